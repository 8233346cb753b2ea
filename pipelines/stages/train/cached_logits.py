"""The teacher's cached logits of rows, read batch by batch."""

from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from distill.data.batches.batches import EncodedRows, EvalBatches, Signals
from distill.data.batches.encode import Batch
from distill.losses.teacher_signals import TeacherSignals
from distill.tasks.logit_rows import OutputRows

_ROWS = 64


class LogitsBatch(NamedTuple):
    """A batch with the teacher's logits.

    Args:
        numbers: Numbers of its samples, int64 [batch].
        batch: The model's inputs.
        logits: The teacher's logits, [rows of logits, classes].
        counts: Rows of logits of each sample.
    """

    numbers: np.ndarray
    batch: Batch
    logits: Tensor
    counts: list[int]


def read_cached_logits(
    rows: EncodedRows, signals: Signals, output_rows: OutputRows, pad_id: int, device: torch.device | None = None
) -> Iterator[LogitsBatch]:
    """Yields all samples in batches of similar length, on `device` or the CPU."""
    batches = EvalBatches(rows, _ROWS, pad_id)
    for numbers, batch in zip(batches.order, batches, strict=True):
        logits = cast(TeacherSignals, signals(batch))["logits"]
        on_device = {name: value.to(device) for name, value in batch.items()}
        yield LogitsBatch(
            numbers, on_device, output_rows.logits(on_device, logits.to(device)), output_rows.counts(on_device)
        )
