"""A world of processes in one, on tensors without data: what a step needs to be traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from distill.models.short_attention import attend_to_short_texts

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


@contextmanager
def use_kernels(backend: str) -> Iterator[None]:
    """Makes attention and dropout keep for the backward pass what they keep on devices that send by this backend.

    On GPUs fused attention draws its masks again instead of keeping all pairs of tokens, and other dropout keeps a byte
    an element. On CPUs attention to short texts isn't fused.
    """
    attend, drop = functional.scaled_dot_product_attention, functional.dropout

    def attend_without_dropout(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **more: Any
    ) -> Tensor:
        return attend(query, key, value, attn_mask, 0.0, **more)

    def drop_by_bytes(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - torch's name
        return torch.native_dropout(input, p, training)[0] if training else input

    if backend != "nccl":
        with attend_to_short_texts():
            yield
        return
    functional.scaled_dot_product_attention, functional.dropout = attend_without_dropout, drop_by_bytes  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = attend, drop


def count_selected(elements: int, share: float) -> int:
    """Returns the number of elements that a mask selects."""
    return max(1, round(share * elements))
