"""Rows of logits with a label each, out of what a model says of a batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distill.data.batches.share import spoken_of
from distill.losses.compose import distribution_loss, divergence
from distill.losses.config import LossConfig

Batch = dict[str, Tensor]


def rows_of(batch: Batch, values: Tensor, dims: int) -> Tensor:
    """`values` of at most `dims` dimensions are rows already; of one more there is one a position, and they become rows
    in the caches' order.

    Positions are the batch's `positions` without the padding, or all its tokens. Labels belong to the position they
    stand at: for a language model the data moves them, not the loss.
    """
    if values.dim() <= dims:
        return values
    mask = spoken_of(batch)
    return values.flatten(0, 1) if mask.all() else values[mask]


def facts_of(signals: Mapping[str, Any]) -> dict[str, Any]:
    """Where signals say so, the temperature that distributions were written at and the classes that the teacher has."""
    return {name: signals[name] for name in ("temperature", "classes") if name in signals}


def by_row(batch: Batch, signals: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Signals cut into the rows that they belong to, each [1, ...] or [positions of the row, ...]."""
    spoken = spoken_of(batch).sum(1).tolist()
    found = {}
    for name, value in signals.items():
        if isinstance(value, Tensor):
            rows = rows_of(batch, value, 2)
            found[name] = list(rows.split(spoken if len(rows) == sum(spoken) else [1] * len(rows)))
    return found


class Answers:
    """A row is a sample with one label, or a position where there are logits for each."""

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        """[rows, classes], of the student's logits as of the teacher's signals."""
        return rows_of(batch, values, 2)

    def labels(self, batch: Batch) -> Tensor:
        """[rows]."""
        return rows_of(batch, batch["labels"], 1)

    def signals(self, batch: Batch, given: Mapping[str, Any]) -> dict[str, Any]:
        """The teacher's signals row by row, with what `facts_of` tells of them."""
        rows = {
            name: self.logits(batch, value) if name == "logits" else rows_of(batch, value, 2)
            for name, value in given.items()
            if isinstance(value, Tensor)
        }
        return rows | facts_of(given)

    def counts(self, batch: Batch) -> list[int]:
        """Rows of each sample."""
        labels = batch["labels"]
        return spoken_of(batch).sum(1).tolist() if labels.dim() > 1 else [1] * len(labels)

    def point(self, values: Tensor) -> Tensor:
        """Numbers [rows, width] as they are compared where a row is no distribution."""
        return values

    def distance(self, own: Tensor, given: Mapping[str, Any], labels: Tensor, temperature: float) -> Tensor:
        """Mean over rows of what parts a student from its teacher: see `distribution_loss`; of numbers, whose labels
        are floats, the squared difference.

        Args:
            own: The student's logits [rows, classes].
            given: The teacher's signals, row by row.
            labels: [rows].
            temperature: Softens both.
        """
        return distribution_loss(own, given, temperature, divergence(LossConfig(), labels))


class LabelAnswers(Answers):
    """A row is one of a sample's labels, which holds or doesn't: logits [batch, labels] become [rows, 2], of which the
    first is 0, so that their softmax is the sigmoid of the second; labels are floats, as stock classes want them.
    """

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(values), values], -1).flatten(0, 1)

    def labels(self, batch: Batch) -> Tensor:
        return batch["labels"].long().flatten()

    def counts(self, batch: Batch) -> list[int]:
        samples, names = batch["labels"].shape
        return [names] * samples


class SpanAnswers(Answers):
    """A row is the start or the end of a sample's answer among its positions: logits [batch, length, 2] become
    [rows, length], minus infinity where the answer can't be; labels are `labels` (starts) and `ends`.
    """

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        mask = spoken_of(batch).to(values.device)
        if values.dim() == 2:  # a row a position, as caches have them
            rows, values = values, values.new_zeros((*mask.shape, 2))
            values[mask] = rows
        return values.transpose(1, 2).masked_fill(~mask[:, None], -torch.inf).flatten(0, 1)

    def labels(self, batch: Batch) -> Tensor:
        return torch.stack([batch["labels"], batch["ends"]], 1).flatten()

    def counts(self, batch: Batch) -> list[int]:
        return [2] * len(batch["labels"])
