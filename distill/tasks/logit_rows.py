"""Conversion of a batch's logits, labels and teacher signals into rows with one label each."""

from typing import cast

import torch
from torch import Tensor

from distill.data.batches.share import loss_mask
from distill.losses.compose import distribution_loss, select_divergence
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import TeacherSignals

Batch = dict[str, Tensor]


def rows_of(batch: Batch, values: Tensor, dims: int) -> Tensor:
    """Returns `values` as rows: unchanged with at most `dims` dimensions, otherwise one row per position, in the order
    of the caches.

    Positions are the batch's `positions` without padding, or all its tokens. Labels belong to their own position: for a
    language model the data pipeline shifts them, not the loss.
    """
    if values.dim() <= dims:
        return values
    mask = loss_mask(batch)
    return values.flatten(0, 1) if mask.all() else values[mask]


def facts_of(signals: TeacherSignals) -> TeacherSignals:
    """Returns the temperature of stored distributions and the teacher's number of classes, if the signals contain
    them.
    """
    facts = {name: value for name, value in signals.items() if name in ("temperature", "classes")}
    return cast(TeacherSignals, facts)


def by_row(batch: Batch, signals: TeacherSignals) -> dict[str, list[Tensor]]:
    """Splits the signals by row of the batch, each [1, ...] or [positions of the row, ...]."""
    spoken = loss_mask(batch).sum(1).tolist()
    found = {}
    for name, value in signals.items():
        if isinstance(value, Tensor):
            rows = rows_of(batch, value, 2)
            found[name] = list(rows.split(spoken if len(rows) == sum(spoken) else [1] * len(rows)))
    return found


class OutputRows:
    """Rows of a task: a row is a sample with one label, or a position if there are logits for each position."""

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        """Returns the student's logits or the teacher's signals as rows [rows, classes]."""
        return rows_of(batch, values, 2)

    def labels(self, batch: Batch) -> Tensor:
        """Returns the labels [rows]."""
        return rows_of(batch, batch["labels"], 1)

    def signals(self, batch: Batch, given: TeacherSignals) -> TeacherSignals:
        """Returns the teacher's signals as rows, with the entries of `facts_of`."""
        rows = {
            name: self.logits(batch, value) if name == "logits" else rows_of(batch, value, 2)
            for name, value in given.items()
            if isinstance(value, Tensor)
        }
        return cast(TeacherSignals, rows) | facts_of(given)

    def counts(self, batch: Batch) -> list[int]:
        """Returns the number of rows of each sample."""
        labels = batch["labels"]
        return loss_mask(batch).sum(1).tolist() if labels.dim() > 1 else [1] * len(labels)

    def point(self, values: Tensor) -> Tensor:
        """Returns values [rows, width] in the form in which they are compared if a row is not a distribution."""
        return values

    def distance(self, own: Tensor, given: TeacherSignals, labels: Tensor, temperature: float) -> Tensor:
        """Returns the mean over rows of the distance between student and teacher: `distribution_loss`, or the squared
        difference for regression, where labels are floats.

        Args:
            own: The student's logits [rows, classes].
            given: The teacher's signals as rows.
            labels: [rows].
            temperature: Temperature of both distributions.
        """
        return distribution_loss(own, given, temperature, select_divergence(LossConfig(), labels))


class LabelRows(OutputRows):
    """Rows of multi-label classification: a row is one binary label of a sample.

    Logits [batch, labels] become [rows, 2] with the first logit 0, so that their softmax is the sigmoid of the second.
    The batch's labels are floats, as stock classes require.
    """

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(values), values], -1).flatten(0, 1)

    def labels(self, batch: Batch) -> Tensor:
        return batch["labels"].long().flatten()

    def counts(self, batch: Batch) -> list[int]:
        samples, names = batch["labels"].shape
        return [names] * samples


class SpanRows(OutputRows):
    """Rows of extractive question answering: a row is the start or the end of a sample's answer among its positions.

    Logits [batch, length, 2] become [rows, length], minus infinity where an answer is not allowed; labels are `labels`
    (starts) and `ends`.
    """

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        mask = loss_mask(batch).to(values.device)
        if values.dim() == 2:  # one row per position, as in caches
            rows, values = values, values.new_zeros((*mask.shape, 2))
            values[mask] = rows
        return values.transpose(1, 2).masked_fill(~mask[:, None], -torch.inf).flatten(0, 1)

    def labels(self, batch: Batch) -> Tensor:
        return torch.stack([batch["labels"], batch["ends"]], 1).flatten()

    def counts(self, batch: Batch) -> list[int]:
        return [2] * len(batch["labels"])
