"""One process's rows of a batch, and what they weigh against the others'."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distill.data.batches.encode import IGNORED


def spoken_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Which positions [rows, length] signals and losses are about: the batch's `positions`, or all of its tokens."""
    mask = batch["attention_mask"].bool()
    return mask & batch["positions"].bool() if "positions" in batch else mask


def counts(batch: Mapping[str, Tensor]) -> dict[str, int]:
    """What the terms of a loss are means over: `rows` the teacher speaks of, `labels`, `tokens`."""
    labels = batch["labels"]
    each = labels.dim() > 1 and not labels.is_floating_point()  # floats are several labels of a sample
    rows = int(spoken_of(batch).sum()) if each else len(labels)
    tokens = int(batch["attention_mask"].bool().sum())
    return {"rows": rows, "labels": int((labels != IGNORED).sum()), "tokens": tokens}


def share_of(batch: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Any]:
    """Every `ranks`-th row from row `rank` on, padded as in the whole batch.

    With more than one process it comes with `batch_rows`, the rows of the whole, and `shares`: for each count its part
    of the whole, times `ranks`. A mean over these rows times its share, averaged over the processes, is the mean over
    the whole batch, however uneven the rows are. A process for which no row is left gets a row of another, with shares
    of 0.
    """
    if ranks == 1:
        return dict(batch)
    whole, size = counts(batch), len(batch["labels"])
    kept = torch.arange(size)[rank::ranks]
    spare = len(kept) == 0
    own: dict[str, Any] = {
        name: value[torch.zeros(1, dtype=torch.long) if spare else kept] for name, value in batch.items()
    }
    if spare:
        own["labels"] = torch.full_like(own["labels"], IGNORED)
    mine = dict.fromkeys(whole, 0) if spare else counts(own)
    own["batch_rows"] = size
    own["shares"] = {name: ranks * mine[name] / max(whole[name], 1) for name in whole}
    return own
