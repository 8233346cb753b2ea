"""Cache that rounds a tensor once for all layers that take it in succession, such as queries, keys and values."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _State(NamedTuple):
    """Everything that the rounded result of a tensor depends on, besides the tensor's identity."""

    version: int
    with_gradient: bool
    dtype: torch.dtype
    dependency_versions: tuple[int, ...]


class _Entry(NamedTuple):
    """The most recent input and its rounded result, held by weak references."""

    x: weakref.ref[Tensor]
    rounded: weakref.ref[Tensor]
    state: _State


class RoundingCache:
    """Cache of one rounded tensor; a copy or pickle of it starts empty."""

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def __reduce__(self) -> tuple[type["RoundingCache"], tuple[()]]:
        return RoundingCache, ()

    def get_or_compute(self, x: Tensor, compute: Callable[[], Tensor], *dependencies: Tensor) -> Tensor:
        """Returns `compute()`, or its earlier result for the same `x`.

        Args:
            x: The tensor that is rounded.
            compute: Rounds it.
            *dependencies: Other tensors that the result depends on.
        """
        if x.is_inference():  # has no version counter, so changes can't be detected
            return compute()
        versions = tuple(each._version for each in dependencies)
        state = _State(x._version, torch.is_grad_enabled(), find_product_dtype(x), versions)
        if self._entry is not None and self._entry.x() is x and self._entry.state == state:
            rounded = self._entry.rounded()
            if rounded is not None:
                return rounded
        rounded = compute()
        self._entry = _Entry(weakref.ref(x), weakref.ref(rounded), state)
        return rounded


def find_product_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which matrix products of `x` are computed here: autocast's, or that of `x`."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
