"""The choice of a student's training rows in each epoch: by class, as a curriculum, or by distance from the teacher."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Batch
from distill.data.batches.sampling import (
    ClassBalanced,
    Curriculum,
    DistanceSampler,
    RowSampler,
    SyntheticShare,
    list_classes,
)
from distill.data.select.scores import entropy
from distill.data.splits.examples import Splits
from distill.eval_mode import eval_mode
from distill.losses.logits import row_kl
from distill.tasks.logit_rows import OutputRows
from distill.train.module import DistillationModule
from pipelines.settings.commands.distill import DistillConfig
from pipelines.stages.prepare.augment import EPOCH_ROWS, ROWS
from pipelines.stages.train.cached_logits import read_cached_logits

RowValues = Callable[[Batch, Tensor], Tensor]  # a batch and the teacher's logits as rows -> a value of each row


def share_synthetic_rows(splits: Splits, rows: int, seed: int) -> RowSampler | None:
    """Returns the sampler of augmentation's `ratio`; None if every epoch has all rows.

    Args:
        splits: The data, with the counts of synthetic rows in its notes.
        rows: Number of training rows, with the unlabelled ones.
        seed: Seed of the order of synthetic rows.
    """
    per_epoch, count = (int(splits.notes.get(name, 0)) for name in (EPOCH_ROWS, ROWS))
    if not 0 < per_epoch < count:
        return None
    last = rows if splits.notes["augment_in"] == "unlabelled" else len(splits.train)
    return SyntheticShare(rows, last - count, last, per_epoch, seed)


def build_sampler(
    config: DistillConfig,
    data: RowsDataModule,
    labels: Sequence[Any],
    module: DistillationModule,
    output_rows: OutputRows,
    seed: int,
    epochs: int,
) -> RowSampler | None:
    """Returns the sampler that `sampling.by` requests; None for uniform sampling.

    Args:
        config: The settings of the run.
        data: The training rows, with cached signals.
        labels: The labels of the first of them; the others have none.
        module: The student in training.
        output_rows: Defines the rows of logits of a sample.
        seed: Seed of the draws.
        epochs: Epochs of the training.
    """
    by, rows = config.sampling.by, len(data.train)
    if by == "balanced":
        return ClassBalanced(list_classes(labels, rows), seed, config.sampling.unbiased)
    if by == "length":
        return Curriculum(data.train.lengths, epochs, config.sampling.start, seed)
    if by == "difficulty":
        entropies = measure_rows(data, output_rows, lambda batch, teacher: entropy(teacher))
        return Curriculum(entropies, epochs, config.sampling.start, seed)
    if by == "distance":
        temperature = config.loss.resolved_temperature

        def compare(batch: Batch, teacher: Tensor) -> Tensor:
            student = output_rows.logits(batch, module(batch)["logits"])
            logs = [torch.log_softmax(each.float() / temperature, -1) for each in (teacher, student)]
            return row_kl(*logs).clamp(min=0)

        def measure() -> np.ndarray:
            with eval_mode(module):
                return measure_rows(data, output_rows, compare, module.device)

        return DistanceSampler(rows, measure, seed, config.sampling.unbiased)
    return None


@torch.no_grad()
def measure_rows(
    data: RowsDataModule, output_rows: OutputRows, compute: RowValues, device: torch.device | None = None
) -> np.ndarray:
    """Returns the mean of a value over the rows of logits of each training sample, float64 [samples].

    Args:
        data: The training rows, with cached logits as signals.
        output_rows: Defines the rows of logits of a sample.
        compute: Called with a batch and the teacher's logits as rows.
        device: Where both have to be; None leaves them on the CPU.
    """
    assert data.signals is not None
    means = np.zeros(len(data.train))
    for numbers, batch, teacher, counts in read_cached_logits(
        data.train, data.signals, output_rows, data.pad_id, device
    ):
        means[numbers] = [float(part.mean()) for part in compute(batch, teacher).double().cpu().split(counts)]
    return means
