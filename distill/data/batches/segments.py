"""Division of the positions of a batch's rows among processes: each has a segment of consecutive positions."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.data.batches.encode import Batch
from distill.data.batches.loss_mask import loss_counts, loss_mask
from distill.data.batches.sharding import fields_of_tokens
from distill.data.batches.signal_tensors import map_tensors
from distill.losses.logits import IGNORED

ROW_MASK, ROW_DOCUMENTS = "row_mask", "row_documents"  # entries with all positions of a segment's rows
_FILLS = {"labels": IGNORED}  # of positions behind the longest row; 0 for other fields


def cut_segment(batch: Batch, segment: int, segments: int) -> Batch:
    """Returns a segment of the positions of a padded batch's rows.

    Rows are padded so that all segments have the same length. A label belongs to its own position, so that none is lost
    at the border of two segments. The result has the batch's entries for these positions and, as `shares`, this
    segment's part of the batch's counts, times `segments`: a mean over its rows times its share, averaged over the
    segments, is the mean over the batch, also where a segment has no row at all.

    It also has `row_mask`, the attention mask of all positions [rows, padded length], and `position_ids`; packed rows
    have position ids already, and get `row_documents` [rows, padded length] for their attention mask.

    Args:
        batch: Padded batch with a label for each position, and the teacher's signals for all of them if it has any.
        segment: Number of the segment.
        segments: Number of segments; 1 returns the batch itself.
    """
    if segments == 1:
        return batch
    mask = loss_mask(batch)
    size = -(-mask.shape[1] // segments)
    span, extra = slice(segment * size, (segment + 1) * size), segments * size - mask.shape[1]
    padded = {name: F.pad(batch[name], (0, extra), value=_FILLS.get(name, 0)) for name in fields_of_tokens(batch)}
    part: dict[str, Any] = {name: value for name, value in batch.items() if name not in (*padded, "signals")}
    part |= {name: value[:, span] for name, value in padded.items()}
    part[ROW_MASK] = row_mask = padded["attention_mask"]
    if "documents" in padded:
        part[ROW_DOCUMENTS] = padded["documents"]
    else:
        part["position_ids"] = (row_mask * torch.arange(segments * size, device=row_mask.device))[:, span]
    part["shares"] = _find_shares(batch, part, segments)
    if batch.get("signals") is not None:
        numbers = (mask.flatten().cumsum(0) - 1).view(mask.shape)  # of positions, in the order of the signals
        places = numbers[:, span][mask[:, span]]
        signals = cast(Mapping[str, Any], batch["signals"])
        part["signals"] = map_tensors(signals, partial(_take_signal, span=span, places=places, extra=extra))
    return part


def _find_shares(batch: Batch, part: Batch, segments: int) -> dict[str, float]:
    whole, part_counts = loss_counts(batch), loss_counts(part)
    shares = cast(Mapping[str, float], batch.get("shares", {}))
    return {name: shares.get(name, 1.0) * segments * part_counts[name] / max(whole[name], 1) for name in whole}


def _take_signal(value: Tensor, span: slice, places: Tensor, extra: int) -> Tensor:
    """Returns a segment's part of a tensor [rows, length, width] or [positions, ...] of a signal."""
    return F.pad(value, (0, 0, 0, extra))[:, span] if value.dim() > 2 else value[places.to(value.device)]
