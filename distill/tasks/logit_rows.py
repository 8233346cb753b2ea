"""Conversion of a batch's logits, labels and teacher signals into rows with one label each."""

from typing import cast

import torch
from torch import Tensor

from distill.data.batches.encode import Batch
from distill.data.batches.loss_mask import loss_mask
from distill.losses.compose import distribution_loss, select_divergence
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import TeacherSignals


def flatten_rows(batch: Batch, values: Tensor, dims: int) -> Tensor:
    """Returns `values` as rows: unchanged with at most `dims` dimensions, otherwise one row per position.

    The order of the rows is that of the caches. Positions are the batch's `positions` without padding, or all
    its tokens. Labels belong to their own position: for a language model the data pipeline shifts them, not the loss.
    """
    if values.dim() <= dims:
        return values
    mask = loss_mask(batch)
    return values.flatten(0, 1) if mask.all() else values[mask]


def select_distribution_settings(signals: TeacherSignals) -> TeacherSignals:
    """Returns the temperature of stored distributions and the teacher's number of classes, if the signals have them."""
    settings = {name: value for name, value in signals.items() if name in ("temperature", "classes")}
    return cast(TeacherSignals, settings)


def split_by_row(batch: Batch, signals: TeacherSignals) -> dict[str, list[Tensor]]:
    """Splits the signals by row of the batch, each [1, ...] or [positions of the row, ...]."""
    positions = loss_mask(batch).sum(1).tolist()
    parts = {}
    for name, value in signals.items():
        if isinstance(value, Tensor):
            rows = flatten_rows(batch, value, 2)
            parts[name] = list(rows.split(positions if len(rows) == sum(positions) else [1] * len(rows)))
    return parts


class OutputRows:
    """Rows of a task: a row is a sample with one label, or a position if there are logits for each position."""

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        """Returns the student's logits or the teacher's signals as rows [rows, classes]."""
        return flatten_rows(batch, values, 2)

    def labels(self, batch: Batch) -> Tensor:
        """Returns the labels [rows]."""
        return flatten_rows(batch, batch["labels"], 1)

    def signals(self, batch: Batch, signals: TeacherSignals) -> TeacherSignals:
        """Returns the teacher's signals as rows, with the entries of `select_distribution_settings`."""
        rows = {
            name: self.logits(batch, value) if name == "logits" else flatten_rows(batch, value, 2)
            for name, value in signals.items()
            if isinstance(value, Tensor)
        }
        return cast(TeacherSignals, rows) | select_distribution_settings(signals)

    def counts(self, batch: Batch) -> list[int]:
        """Returns the number of rows of each sample."""
        labels = batch["labels"]
        return loss_mask(batch).sum(1).tolist() if labels.dim() > 1 else [1] * len(labels)

    def to_comparable(self, values: Tensor) -> Tensor:
        """Returns values [rows, width] in the form in which they are compared if a row is not a distribution."""
        return values

    def distance(self, student: Tensor, teacher: TeacherSignals, labels: Tensor, temperature: float) -> Tensor:
        """Returns the mean over rows of the distance between student and teacher.

        It is `distribution_loss`, or the squared difference for regression, where labels are floats.

        Args:
            student: The student's logits [rows, classes].
            teacher: The teacher's signals as rows.
            labels: [rows].
            temperature: Temperature of both distributions.
        """
        return distribution_loss(student, teacher, temperature, select_divergence(LossConfig(), labels))


class LabelRows(OutputRows):
    """Rows of multi-label classification: a row is one binary label of a sample.

    Logits [batch, labels] become [rows, 2] with the first logit 0, so that their softmax is the sigmoid of the second.
    The batch's labels are floats, as stock classes require.
    """

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        """Returns logits [batch, labels] as rows [batch · labels, 2]."""
        return torch.stack([torch.zeros_like(values), values], -1).flatten(0, 1)

    def labels(self, batch: Batch) -> Tensor:
        """Returns 0 or 1 for each label of each sample, int64 [batch · labels]."""
        return batch["labels"].long().flatten()

    def counts(self, batch: Batch) -> list[int]:
        """Returns the number of labels, once per sample."""
        samples, names = batch["labels"].shape
        return [names] * samples


class SpanRows(OutputRows):
    """Rows of extractive question answering: a row is the start or the end of a sample's answer among its positions.

    Logits [batch, length, 2] become [rows, length], minus infinity where an answer is not allowed; labels are `labels`
    (starts) and `ends`.
    """

    def logits(self, batch: Batch, values: Tensor) -> Tensor:
        """Returns logits [batch, length, 2], or those of a cache's positions [positions, 2], as [2 · batch, length]."""
        mask = loss_mask(batch).to(values.device)
        if values.dim() == 2:  # one row per position, as in caches
            rows, values = values, values.new_zeros((*mask.shape, 2))
            values[mask] = rows
        return values.transpose(1, 2).masked_fill(~mask[:, None], -torch.inf).flatten(0, 1)

    def labels(self, batch: Batch) -> Tensor:
        """Returns start and end of each sample's answer [2 · batch]."""
        return torch.stack([batch["labels"], batch["ends"]], 1).flatten()

    def counts(self, batch: Batch) -> list[int]:
        """Returns two rows for each sample."""
        return [2] * len(batch["labels"])
