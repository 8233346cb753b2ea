"""Base class of the scorers: one class a task scores models in validation and in the final evaluation."""

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from distill.losses.logits import IGNORED


class Scorer(Metric):
    """Accumulates predictions of a model and scores them; higher is better.

    Validation during training calls `update` with rows of logits, on any number of processes, and `compute`, which
    returns the validation metric. Evaluation calls `record` with samples of an encoded split on one process; `scores`
    then returns all scores of the task, its main one first. Where that is the validation metric too, both are computed
    from the same counts.
    """

    higher_is_better = True
    full_state_update = False

    def add_counts(self, *names: str) -> None:
        """Adds integer states that start at 0 and are summed over processes."""
        for name in names:
            self.add_state(name, torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    @abstractmethod
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds rows of a batch; logits [rows, classes], labels [rows] with IGNORED for unlabelled rows."""

    @abstractmethod
    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Adds samples of the split that the scorer was made for, with the model's logits.

        `rows` are the indices of the samples in the split.
        """

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """Returns the scores of the recorded samples by name, the task's metric first."""

    @abstractmethod
    def decisions(self) -> np.ndarray:
        """Returns the model's decisions in an order independent of the batches, for comparison with another model."""


class RowAccuracy(Scorer):
    """Share of rows whose largest logit is at the label.

    The number of classes may differ between batches and adds no cost (`MulticlassAccuracy` over a vocabulary would keep
    counts for each class).
    """

    correct: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_counts("correct", "total")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds rows of a batch; logits [rows, classes], labels [rows] with IGNORED for unlabelled rows."""
        labelled = labels != IGNORED
        self.correct += ((logits.argmax(-1) == labels) & labelled).sum()
        self.total += labelled.sum()

    def compute(self) -> Tensor:
        """Returns the share of correct rows over all processes, a scalar."""
        return self.correct / self.total.clamp(min=1)

    def accuracy(self) -> float:
        """Returns the share of correct rows in float64."""
        return int(self.correct) / max(1, int(self.total))


class InsideF1(Scorer):
    """Micro F1 over all classes except `outside`, which is the absence of a label or of a tag.

    Without such a class (`outside` is None) it is the accuracy. torchmetrics has no such score: with
    `ignore_index=outside` it drops the rows of that class, and so the false positives among them.
    """

    correct: Tensor
    predicted: Tensor
    true: Tensor

    def __init__(self, outside: int | None) -> None:
        super().__init__()
        self.outside = -1 if outside is None else outside
        self.add_counts("correct", "predicted", "true")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds rows of a batch; logits [rows, classes], labels [rows] with IGNORED for unlabelled rows."""
        classes, labelled = logits.argmax(-1), labels != IGNORED
        predicted, true = (classes != self.outside) & labelled, (labels != self.outside) & labelled
        self.correct += (predicted & true & (classes == labels)).sum()
        self.predicted += predicted.sum()
        self.true += true.sum()

    def compute(self) -> Tensor:
        """Returns the F1 over all processes, a scalar; 0 without any predicted or true row."""
        return 2 * self.correct / (self.predicted + self.true).clamp(min=1)

    def f1(self) -> float:
        """Returns the F1 in float64."""
        return 2 * int(self.correct) / max(1, int(self.predicted) + int(self.true))


def concatenate_state(state: list[Tensor] | Tensor) -> Tensor:
    """Returns the rows of a concatenated state; after synchronization over processes it is one tensor already."""
    if isinstance(state, Tensor):
        return state
    return torch.cat(state) if state else torch.zeros(0)
