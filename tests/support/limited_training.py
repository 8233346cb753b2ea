"""A training whose address space is limited from a step on: `python -m support.limited_training FOLDER STEP=MIB ...`.

The limits are relative to what the process has mapped when the first of them is set. It prints the losses as JSON.
"""

import csv
import json
import resource
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from distill.data.batches.data_module import TextDataModule
from distill.data.splits.examples import Examples, Splits
from distill.losses.config import LossConfig
from distill.tasks.text_classification import TextClassification
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console
from pipelines.runs.manifest import LOGS, SCRATCH
from pipelines.runs.trainer import fit_module
from pipelines.settings.distill_config import MachineConfig

LABELS = ("even", "odd")
TRAIN = TrainConfig(epochs=1, learning_rate=1e-3, batch_size=64, dropout=0.0, checkpoint_every=1000)


def mapped_bytes() -> int:
    """Returns the address space of this process, which RLIMIT_AS limits."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmSize")))


class LimitMemory(Callback):
    """Limits the address space from each step of `limits` on."""

    def __init__(self, limits: dict[int, int]):
        self.limits, self.start = limits, 0

    def on_train_batch_start(self, trainer, pl_module, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.limits:
            self.start = self.start or mapped_bytes()
            resource.setrlimit(
                resource.RLIMIT_AS, (self.start + (self.limits[batch_idx] << 20), resource.RLIM_INFINITY)
            )

    def on_train_end(self, trainer, pl_module) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def draw_examples(count: int) -> Examples:
    draw = torch.Generator().manual_seed(count)
    numbers = torch.randint(0, 400, (count, 120), generator=draw).tolist()
    return Examples([" ".join(map(str, row)) for row in numbers], None, [row[0] % 2 for row in numbers])


def train_limited(folder: Path, limits: dict[int, int]) -> dict[str, Any]:
    """Returns the losses of a training and the number of parts of its last batches."""
    lightning.seed_everything(7, verbose=False)
    config = BertConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, num_labels=2
    )
    config.id2label = dict(enumerate(LABELS))
    module = DistillationModule(
        BertForSequenceClassification(config), loss=LossConfig(kl=0, ce=1), train=TRAIN,
        metric=TextClassification(LABELS).scorer(),
    )  # fmt: skip
    splits = Splits(LABELS, draw_examples(640), draw_examples(16), draw_examples(16), Examples([], None, []), {})
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    data = TextDataModule(splits, tokenizer, batch_size=TRAIN.batch_size, max_length=128, seed=7)
    (folder / SCRATCH).mkdir(parents=True)
    fit_module(
        module, data, folder, label="limited", train=TRAIN,
        machine=MachineConfig(accelerator="cpu", precision="32", threads=1, log_every=1), precision="32", seed=7,
        console=Console(quiet=True), wandb_folder=folder, callbacks=[LimitMemory(limits)],
    )  # fmt: skip
    (log,) = (folder / LOGS).rglob("metrics.csv")
    with log.open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    return {"losses": losses, "parts": module.micro_batches.parts}


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = dict(pair.split("=") for pair in sys.argv[2:])
    sys.stdout.write(json.dumps(train_limited(Path(sys.argv[1]), {int(step): int(mib) for step, mib in given.items()})))
