"""Rounds a tensor once for the layers that read it in a row, as queries, keys and values do."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Last(NamedTuple):
    """What was read last, and what came out; neither is kept alive."""

    x: weakref.ref[Tensor]
    rounded: weakref.ref[Tensor]
    state: tuple[Any, ...]


class Sharing:
    """Remembers one tensor. A copy of it remembers nothing."""

    def __init__(self) -> None:
        self.last: Last | None = None

    def __reduce__(self) -> tuple[type["Sharing"], tuple[()]]:
        return Sharing, ()

    def of(self, x: Tensor, make: Callable[[], Tensor], *reads: Tensor) -> Tensor:
        """`make()` of `x`, or what it gave for the same `x` before; `reads` are what else it depends on."""
        if x.is_inference():  # has no version: whether it was changed can't be told
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
    """In which products of `x` are computed here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
