"""Division of a batch into smaller ones whose losses add up to its own."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from distill.data.batches.encode import Batch
from distill.data.batches.loss_mask import loss_counts, loss_mask


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Returns the rows of a padded batch in up to `parts` batches of nearly equal numbers of rows, in their order.

    Each has `shares`, its part of the batch's counts, so that its loss terms, which are means over its own rows, add up
    to those of the whole batch. One part is the batch itself.
    """
    rows = len(batch["attention_mask"])
    size = -(-rows // parts)
    if size >= rows:
        return [batch]
    whole = loss_counts(batch)
    shares = cast(Mapping[str, float], batch.get("shares", {}))
    slices = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    signals = [None] * len(slices) if batch.get("signals") is None else _split_signals(batch, slices)
    batches = []
    for at, own_signals in zip(slices, signals, strict=True):
        part: dict[str, Any] = {name: _take_rows(value, at, rows) for name, value in batch.items() if name != "signals"}
        counts = loss_counts(part)
        part["shares"] = {name: shares.get(name, 1.0) * counts[name] / max(whole[name], 1) for name in whole}
        if own_signals is not None:
            part["signals"] = own_signals
        batches.append(part)
    return batches


def _take_rows(value: object, at: slice, rows: int) -> object:
    """Returns the rows of a tensor or list with an entry for each row, and anything else unchanged."""
    if isinstance(value, Tensor):
        return value[at] if value.dim() and len(value) == rows else value
    return value[at] if isinstance(value, list) and len(value) == rows else value


def _split_signals(batch: Batch, slices: Sequence[slice]) -> list[dict[str, Any]]:
    """Returns the teacher's signals of each slice of the rows; those of positions are in the order of the rows."""
    positions = loss_mask(batch).sum(1)
    ends = torch.cat([positions.new_zeros(1), positions.cumsum(0)]).tolist()
    signals = cast(Mapping[str, Any], batch["signals"])
    return [
        {
            name: _take_signal(value, at, slice(ends[at.start], ends[at.stop]), ends[-1])
            for name, value in signals.items()
        }
        for at in slices
    ]


def _take_signal(value: object, at: slice, places: slice, count: int) -> object:
    """Returns a part of a signal.

    Args:
        value: A tensor [rows, length, width] or [rows or positions, ...], layers of them, or a list with a tensor
            [tokens] for each row.
        at: The rows.
        places: The positions of these rows.
        count: Number of positions of all rows.
    """
    if isinstance(value, Tensor):
        if not value.dim():
            return value
        # The labels don't tell: a question has one start and one end, and yet signals for each position.
        return value[places] if value.dim() <= 2 and len(value) == count else value[at]
    if isinstance(value, Mapping):
        return {key: _take_signal(each, at, places, count) for key, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Tensor) and value[0].dim() == 1:
        return value[at]
    if isinstance(value, tuple | list):
        return type(value)(_take_signal(each, at, places, count) for each in value)
    return value
