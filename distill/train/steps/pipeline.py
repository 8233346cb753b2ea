"""The training step of a student whose layers are on several processes, one pipeline stage each."""

from typing import TypedDict, cast

import torch
from torch import Tensor

from distill.data.batches.encode import Batch
from distill.data.batches.loss_mask import loss_counts
from distill.losses.compose import compute_loss_terms, scale_by_share, weighted_sum
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import TeacherSignals
from distill.parallel.pipeline import PipelineTrainer
from distill.tasks.logit_rows import OutputRows, flatten_rows, split_by_row
from distill.train.steps.batch_entries import find_shares
from distill.train.steps.plain import weigh_gradients


class _Targets(TypedDict):
    """What the last stage computes the loss from, with one entry per row."""

    batch: Batch
    signals: dict[str, list[Tensor]]


def train_stages(
    stages: PipelineTrainer,
    batch: Batch,
    signals: TeacherSignals,
    settings: TeacherSignals,
    loss: LossConfig,
    steps: int,
) -> Tensor:
    """Runs the forward and backward passes of a batch through all stages.

    Args:
        stages: Runs the stages of the student.
        batch: Padded batch with labels, and `row_weights` if the gradient of each row is weighted.
        signals: The teacher's signals for the batch.
        settings: Temperature and number of classes of the signals, which have no rows.
        loss: Settings of the terms in this step.
        steps: Number of batches over which gradients are accumulated; the gradients are divided by it.

    Returns:
        The batch's weighted sum of the terms, without an autograd graph.
    """
    totals = loss_counts(batch)
    batch_shares = find_shares(batch) or dict.fromkeys(totals, 1.0)
    names = [name for name in ("labels", "attention_mask", "positions", "row_weights") if name in batch]
    targets = _Targets(batch={name: batch[name] for name in names}, signals=split_by_row(batch, signals))

    def compute_loss(logits: Tensor, part: _Targets) -> Tensor:
        rows = part["batch"]
        part_signals = {name: torch.cat(tensors) for name, tensors in part["signals"].items()}
        teacher = cast(TeacherSignals, part_signals) | settings
        labels, mask = flatten_rows(rows, rows["labels"], 1), rows["attention_mask"]
        logits = flatten_rows(rows, logits, 2)
        if "row_weights" in rows:
            logits = weigh_gradients(logits, rows["row_weights"], OutputRows().counts(rows))
        terms = compute_loss_terms(loss, logits, labels, mask, teacher)
        counts = loss_counts(rows)
        shares = {name: counts[name] / max(totals[name], 1) * batch_shares[name] for name in counts}
        return weighted_sum(loss, scale_by_share(loss, terms, shares)) / steps

    return stages.step(batch, targets, compute_loss).sum() * steps
