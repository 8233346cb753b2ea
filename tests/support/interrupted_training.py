"""A small training under a Lightning Trainer, and a function that stops it after any batch."""

from collections.abc import Sequence
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from distill.data.batches.data_module import TextDataModule
from distill.data.splits.examples import Examples, Splits
from distill.losses.config import LossConfig
from distill.student.build import build_student
from distill.tasks.text_classification import TextClassification
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs import trainer as trainers
from pipelines.runs.callbacks.fit_progress import FitProgress
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig
from support.tiny_models import make_rows

BASE = TrainConfig(epochs=3, learning_rate=1e-3, batch_size=8, dropout=0.1, checkpoint_every=2)


MACHINE = MachineConfig(accelerator="cpu", precision="32", threads=1)


LABELS = ("billing", "delivery", "login", "refund", "weather")


class Killed(Exception):  # noqa: N818
    """Simulates a kill."""


def examples(count: int, seed: int) -> Examples:
    rows = make_rows(count, seed)
    return Examples([text for text, _ in rows], None, [LABELS.index(label) for _, label in rows])


SPLITS = Splits(LABELS, examples(52, 1), examples(20, 2), examples(20, 3), Examples([], None), {})


def train_once(
    tiny_model,
    tokenizer,
    folder: Path,
    config: TrainConfig,
    loss: LossConfig,
    callbacks: Sequence[Callback] = (),
    precision: str = "32",
) -> dict[str, torch.Tensor]:
    lightning.seed_everything(7, verbose=False)
    teacher = tiny_model("bert")
    module = DistillationModule(
        build_student(teacher, "layers=2,hidden=16"),
        loss=loss,
        train=config,
        signals=OnlineTeacher(teacher, loss.teacher_outputs),
        metric=TextClassification(LABELS).scorer(),
        teacher_sizes=(4, 32),
    )
    data = TextDataModule(SPLITS, tokenizer, batch_size=config.batch_size, max_length=32, seed=7)
    job = TrainingJob(
        label="test", train=config, machine=MACHINE, precision=precision, seed=7, console=Console(quiet=True),
        wandb_folder=folder,
    )  # fmt: skip
    (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
    trainers.fit_module(module, data, folder, job, callbacks)
    return {name: value.clone() for name, value in module.state_dict().items()}


def killed_at(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops the next training after `batch` batches, like a kill: checkpoints survive, memory doesn't."""
    seen = 0
    real = FitProgress.on_train_batch_end

    def counted(self, *args) -> None:
        nonlocal seen
        real(self, *args)
        seen += 1
        if seen == batch:
            raise Killed

    monkeypatch.setattr(FitProgress, "on_train_batch_end", counted)
