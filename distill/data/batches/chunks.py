"""Division of a batch of texts into chunks of consecutive tokens whose losses add up to its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from distill.data.batches.encode import Batch
from distill.data.batches.loss_mask import loss_counts, loss_mask
from distill.data.batches.signal_tensors import map_tensors
from distill.errors import InputError


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of the rows of a batch.

    Args:
        batch: The tokens, their labels and the teacher's signals for them, with `shares`, the chunk's part of the
            batch's counts.
        rows: Which rows of the previous chunk, or for the first one of the batch, are in this one, int64 [rows].
        has_loss: Whether any of its positions has a loss.
    """

    batch: Batch
    rows: Tensor
    has_loss: bool


def cut_chunks(batch: Batch, tokens: int) -> Iterator[Chunk]:
    """Yields the chunks of a padded batch, in the order of the tokens.

    Rows end at their last position with a loss: shorter ones aren't in later chunks, nor is what all rows only pad.

    Args:
        batch: Labels [rows, length] are those of their own position, so that none is lost at the edge of a chunk.
        tokens: Number of tokens of each row in a chunk.

    Raises:
        InputError: Rows have one label each, or are packed.
    """
    _check_rows(batch)
    mask = loss_mask(batch)
    rows, length = mask.shape
    numbers = (mask.flatten().cumsum(0) - 1).view(rows, length)  # of positions, in the order of the signals
    ends = (mask * torch.arange(1, length + 1, device=mask.device)).amax(1)
    counts = loss_counts(batch)
    shares = cast(Mapping[str, float], batch.get("shares", {}))
    present = torch.arange(rows, device=mask.device)
    for start in range(0, int(ends.max()), tokens):
        remaining = ends[present] > start
        present = present[remaining]
        span = slice(start, min(start + tokens, int(ends.max())))
        requested = mask[present, span]
        places = numbers[present, span][requested]
        part: dict[str, Any] = {
            name: _take_tokens(value, present, span, rows, length) for name, value in batch.items() if name != "signals"
        }
        part_counts = loss_counts(part)
        part["shares"] = {name: shares.get(name, 1.0) * part_counts[name] / max(counts[name], 1) for name in counts}
        if batch.get("signals") is not None:
            signals = cast(Mapping[str, Any], batch["signals"])
            part["signals"] = map_tensors(signals, partial(_take_places, present=present, span=span, places=places))
        yield Chunk(part, remaining.nonzero()[:, 0], bool(requested.any()))


def _check_rows(batch: Batch) -> None:
    if "documents" in batch:
        raise InputError(
            "train.backward_window: expected one document a row, found packed rows: the keys of a document would be "
            "carried into the next one; use data.packing none or stream"
        )
    if batch["labels"].shape != batch["attention_mask"].shape or batch["labels"].is_floating_point():
        raise InputError(
            f"train.backward_window: expected a label for each token, found labels {[*batch['labels'].shape]} of rows "
            f"{[*batch['attention_mask'].shape]}: a chunk would have no loss of its own"
        )


def _take_tokens(value: object, present: Tensor, span: slice, rows: int, length: int) -> object:
    """Returns the chunk's part of an entry with a value for each token or each row, and any other unchanged."""
    if isinstance(value, Tensor) and value.dim() and len(value) == rows:
        chosen = value[present.to(value.device)]
        return chosen[:, span] if value.dim() > 1 and value.shape[1] == length else chosen
    if isinstance(value, list) and len(value) == rows:
        return [value[number] for number in present.tolist()]
    return value


def _take_places(value: Tensor, present: Tensor, span: slice, places: Tensor) -> Tensor:
    """Returns the chunk's part of a tensor [rows, length, width] or [positions, ...] of a signal."""
    return value[present.to(value.device)][:, span] if value.dim() > 2 else value[places.to(value.device)]
