"""Accuracy over rows with any number of classes."""

import torch
from torch import Tensor
from torchmetrics import Metric

from distill.data.batches.encode import IGNORED


class RowAccuracy(Metric):
    """Share of rows whose largest logit is at the label.

    The number of classes may differ between batches and adds no cost (`MulticlassAccuracy` over a vocabulary would keep
    counts for each class).
    """

    higher_is_better = True
    full_state_update = False
    right: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "total"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        known = labels != IGNORED
        self.right += ((logits.argmax(-1) == labels) & known).sum()
        self.total += known.sum()

    def compute(self) -> Tensor:
        return self.right / self.total.clamp(min=1)
