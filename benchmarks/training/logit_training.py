"""Training of students on their teacher's logits for every text, which are computed once."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from benchmarks.pruning.sparse_runtimes import LogitsRunner, compute_logits
from compress.measure.latency import TimedInputs
from compress.sparsity.training import SparseTraining
from distill.data.batches.encode import Encoded
from distill.losses.logits import forward_kl
from distill.tasks.logit_rows import OutputRows
from pipelines.runs.console import Console

TEMPERATURE = 2.0


def load_targets(file: Path, teacher: PreTrainedModel, data: Encoded, pad_id: int) -> np.ndarray:
    """Returns the teacher's logits for the texts, in the data's order [rows, classes]; computed once per file."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, compute_all_logits(partial(compute_logits, teacher), data, pad_id))
    targets: np.ndarray = np.load(file)
    return targets


def take_steps(
    student: PreTrainedModel,
    optimizer: Optimizer,
    schedule: LRScheduler,
    data: Encoded,
    pad_id: int,
    batches: Sequence[np.ndarray],
    targets: np.ndarray,
    output_rows: OutputRows,
    max_norm: float,
    label: str,
    console: Console,
    sparsity: SparseTraining | None = None,
) -> None:
    """Trains a student with a step for each batch of texts, on the KL divergence from the targets.

    `output_rows` converts the logits to rows with a distribution each.
    """
    logits = torch.from_numpy(targets)
    with console.track(label, len(batches), "steps") as advance:
        for batch in batches:
            inputs = data.collate(batch, pad_id)
            inputs.pop("labels")
            rows = (output_rows.logits(inputs, each) for each in (student(**inputs).logits, logits[batch]))
            loss = forward_kl(*rows, temperature=TEMPERATURE)
            loss.backward()
            if sparsity:
                sparsity.after_backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), max_norm)
            optimizer.step()
            if sparsity:
                sparsity.after_step(optimizer)
            schedule.step()
            optimizer.zero_grad()
            advance(1, f"loss {float(loss.detach()):.3f}")


def collate_arrays(data: Encoded, rows: np.ndarray, pad_id: int) -> TimedInputs:
    """Returns the inputs of some rows as arrays."""
    return {name: value.numpy() for name, value in data.collate(rows, pad_id).items() if name != "labels"}


def compute_all_logits(run: LogitsRunner, data: Encoded, pad_id: int) -> np.ndarray:
    """Returns the logits of all rows in the data's order, [rows, classes]."""
    order = np.argsort(data.lengths, kind="stable")
    parts = [run(collate_arrays(data, order[i : i + 32], pad_id)) for i in range(0, len(order), 32)]
    return np.concatenate(parts)[np.argsort(order)]
