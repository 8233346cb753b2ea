"""A world of processes in one, on tensors without data: what a step needs to be traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

MASK_DIMENSIONS = 2  # rows and positions


@contextmanager
def simulate_world(processes: int) -> Iterator[None]:
    """Makes this process the first of a world in which collectives return at once, without sending anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


class SelectShare(TorchFunctionMode):
    """Makes every mask select the same share of the elements, the first ones; other tests of tensors are true.

    Without data it is unknown how many elements a mask selects, and whether all values are finite.

    Args:
        share: Share of the elements, above 0.
    """

    def __init__(self, share: float = 1.0):
        super().__init__()
        self.share = share
        self.incomplete: list[Tensor] = []  # whether masks select everything, which they don't

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs a function; those of masks answer without data."""
        if function is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            values = args[0].flatten(0, args[1].dim() - 1)
            return values[: count_selected(len(values), self.share)]
        if function is Tensor.__bool__:
            return not any(args[0] is each for each in self.incomplete)
        result = function(*args, **(kwargs or {}))
        if function is Tensor.all and self.share < 1 and args[0].dim() == MASK_DIMENSIONS:
            self.incomplete.append(result)
        return result


def count_selected(elements: int, share: float) -> int:
    """Returns the number of elements that a mask selects."""
    return max(1, round(share * elements))
