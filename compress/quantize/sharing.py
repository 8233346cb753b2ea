"""Cache that rounds a tensor once for all layers that take it in succession, such as queries, keys and values."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Last(NamedTuple):
    """The most recent input and its rounded result, held by weak references."""

    x: weakref.ref[Tensor]
    rounded: weakref.ref[Tensor]
    state: tuple[Any, ...]


class RoundingCache:
    """Cache of one rounded tensor; a copy or pickle of it starts empty."""

    def __init__(self) -> None:
        self.last: Last | None = None

    def __reduce__(self) -> tuple[type["RoundingCache"], tuple[()]]:
        return RoundingCache, ()

    def of(self, x: Tensor, make: Callable[[], Tensor], *reads: Tensor) -> Tensor:
        """Returns `make()`, or its earlier result for the same `x`.

        `reads` are other tensors that the result depends on.
        """
        if x.is_inference():  # has no version counter, so changes can't be detected
            return make()
        state = (x._version, torch.is_grad_enabled(), products_dtype(x), *(each._version for each in reads))
        if self.last is not None and self.last.x() is x and self.last.state == state:
            rounded = self.last.rounded()
            if rounded is not None:
                return rounded
        rounded = make()
        self.last = Last(weakref.ref(x), weakref.ref(rounded), state)
        return rounded


def products_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which matrix products of `x` are computed here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
