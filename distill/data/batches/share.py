"""Sharding of batches across processes, with the weights that make losses means over the whole batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distill.data.batches.encode import IGNORED

_COUNTS = ("rows", "labels", "tokens")  # of `loss_counts`


def loss_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the mask of positions [rows, length] with signals and losses: the batch's `positions`, or all tokens."""
    mask = batch["attention_mask"].bool()
    return mask & batch["positions"].bool() if "positions" in batch else mask


def loss_counts(batch: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the counts that loss terms are means over: `rows` with teacher signals, `labels`, `tokens`."""
    labels = batch["labels"]
    per_position = labels.dim() > 1 and not labels.is_floating_point()  # floats: several labels per sample
    rows = int(loss_mask(batch).sum()) if per_position else len(labels)
    tokens = int(batch["attention_mask"].bool().sum())
    return {"rows": rows, "labels": int((labels != IGNORED).sum()), "tokens": tokens}


def shard_batch(batch: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Any]:
    """Returns every `ranks`-th row from row `rank` on, padded as in the whole batch.

    With more than one process, two entries are added: `batch_rows`, the number of rows in the whole batch, and
    `shares`: for each count, this process's part of the total, times `ranks`. A mean over these rows times its share,
    averaged over the processes, is the mean over the whole batch, however uneven the rows are. A process without rows
    gets the first row of the batch, with shares of 0.
    """
    if ranks == 1:
        return dict(batch)
    whole, size = loss_counts(batch), len(batch["labels"])
    selected = torch.arange(size)[rank::ranks]
    is_empty = len(selected) == 0
    shard: dict[str, Any] = {
        name: value[torch.zeros(1, dtype=torch.long) if is_empty else selected] for name, value in batch.items()
    }
    if is_empty:
        shard["labels"] = torch.full_like(shard["labels"], IGNORED)
    counts = dict.fromkeys(whole, 0) if is_empty else loss_counts(shard)
    shard["batch_rows"] = size
    shard["shares"] = {name: ranks * counts[name] / max(whole[name], 1) for name in whole}
    return shard


def weigh_batch(batch: dict[str, Any], weight: float) -> None:
    """Multiplies the loss terms of a batch by a weight, in its `shares`."""
    batch["shares"] = {name: weight * share for name, share in batch.get("shares", dict.fromkeys(_COUNTS, 1.0)).items()}
