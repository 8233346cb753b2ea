"""The record of a teacher's training: its answers to the training rows after every epoch."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from distill.data.batches.batches import EvalBatches
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.sampling import EveryRow
from distill.eval_mode import eval_mode
from distill.train.module import DistillationModule
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.stage import Artefact

DYNAMICS_FILE = "dynamics.pt"
_ROWS = 64


def record_dynamics(data: RowsDataModule, module: DistillationModule, folder: Path) -> Callable[[], None]:
    """Makes a training record its answers before every epoch but the first; returns a function that ends the record.

    That function adds the answers after the last epoch and writes `dynamics.pt` to the folder. Records of earlier
    epochs are kept in the folder's scratch, also when the training is resumed.
    """
    scratch = folder / SCRATCH / "dynamics"
    scratch.mkdir(parents=True, exist_ok=True)

    def record(epoch: int) -> None:
        if epoch:
            torch.save(compute_logits_of_rows(data, module), scratch / f"{epoch}.pt")

    data.sampler = EveryRow(len(data.train), record)
    epochs = module.train_config.epochs

    def finish() -> None:
        record(epochs)
        data.sampler = None
        files = [scratch / f"{epoch}.pt" for epoch in range(1, epochs + 1)]
        logits = [torch.load(file, weights_only=True) for file in files if file.exists()]
        torch.save(torch.stack(logits), folder / DYNAMICS_FILE)

    return finish


@torch.no_grad()
def compute_logits_of_rows(data: RowsDataModule, module: DistillationModule) -> Tensor:
    """Returns the model's logits for each training row, float32 [rows, classes]."""
    batches = EvalBatches(data.train, _ROWS, data.pad_id)
    device = next(module.parameters()).device
    all_logits: Tensor | None = None
    with eval_mode(module):
        for rows, batch in zip(batches.order, batches, strict=True):
            logits = module({name: value.to(device) for name, value in batch.items()})["logits"].float().cpu()
            all_logits = logits.new_empty(len(data.train), logits.shape[1]) if all_logits is None else all_logits
            all_logits[torch.from_numpy(rows)] = logits
    assert all_logits is not None
    return all_logits


def read_dynamics(teacher: Artefact) -> Tensor:
    """Returns the teacher's logits for the training rows after every epoch, [epochs, rows, classes]."""
    logits: Tensor = torch.load(teacher.folder / DYNAMICS_FILE, weights_only=True)
    return logits
