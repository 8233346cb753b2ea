"""Which rows, labels and tokens of a batch have signals and losses."""

from collections.abc import Mapping

from torch import Tensor

from distill.losses.logits import IGNORED

COUNTED = ("rows", "labels", "tokens")  # what loss terms are means over


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
