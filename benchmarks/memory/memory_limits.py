"""Trainings under real limits of the address space (RLIMIT_AS), drawn between what they need at least and plainly.

    python -m benchmarks.memory.memory_limits  # 20 limits; an encoder of 4 layers, batches of 64 x 120
    python -m benchmarks.memory.memory_limits --limits 2 --batches 4

The plain peak is that of the training with whole batches, the smallest that with a row at a time, both above what the
process has mapped when the training starts. Each limit is set before `batch_size: auto` probes the longest rows, and
lowered again in the middle of the training in every second run, to a value between the smallest peak and itself.
Printed per limit: whether the training ended or ran out of memory, the micro-batches at the end, and the largest
difference to the plain run's losses. A training that fails in another way ends the benchmark with its error.
"""

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from compress.measure.memory import read_kernel_sizes
from distill.data.batches.data_module import TextDataModule
from distill.data.splits.examples import Examples, Splits
from distill.losses.config import LossConfig
from distill.tasks.text_classification import TextClassification
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.micro_batches import is_out_of_memory
from pipelines.runs.console import Console
from pipelines.runs.manifest import LOGS, SCRATCH
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig

LABELS, WORDS, ROWS = ("even", "odd"), 400, 64
# Freed tensors go back to the system, since the limit is one of addresses and not of memory.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """How a training under limits ended.

    Args:
        losses: The loss of each step.
        parts: Micro-batches of a batch at the end.
        peak: Most bytes of address space above those at the start.
    """

    losses: list[float]
    parts: int
    peak: int


def main() -> None:
    """Draws limits, trains under each and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=int, default=20)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(vars(train_under_limits(**json.loads(options.worker)))))
        return
    plain = run_worker(options.batches, "whole")
    smallest = run_worker(options.batches, "rows")
    assert plain is not None
    assert smallest is not None
    console, draw = Console(), np.random.default_rng(options.seed)
    console.say(f"plain: {plain.peak / 1e6:.0f} MB above the start, a row at a time: {smallest.peak / 1e6:.0f} MB")
    rows = []
    for number in range(options.limits):
        limits = {"-1": int(draw.uniform(1.1 * smallest.peak, plain.peak))}
        if number % 2:
            limits[str(options.batches // 2)] = int(draw.uniform(1.1 * smallest.peak, limits["-1"]))
        rows.append(describe_outcome(limits, run_worker(options.batches, "auto", limits), plain))
    console.table("Limits above the start", ("MB", "ended", "micro-batches", "largest difference of losses"), rows)


def describe_outcome(limits: dict[str, int], limited: Outcome | None, plain: Outcome) -> tuple[str, ...]:
    """Returns a row of the table."""
    megabytes = ", then ".join(f"{limit / 1e6:.0f}" for limit in limits.values())
    if limited is None:
        return megabytes, "no", "", ""
    difference = max(abs(loss - plain_loss) for loss, plain_loss in zip(limited.losses, plain.losses, strict=True))
    return megabytes, "yes", str(limited.parts), f"{difference:.1e}"


def run_worker(batches: int, split: str, limits: dict[str, int] | None = None) -> Outcome | None:
    """Returns the outcome of a training in a process of its own; None if it ran out of memory.

    Raises:
        RuntimeError: It failed in another way.
    """
    settings = json.dumps({"batches": batches, "split": split, "limits": limits or {}})
    command = [sys.executable, "-m", "benchmarks.memory.memory_limits", "--worker", settings]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)  # noqa: S603 - own command
    if done.returncode == 0:
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))
    if "MemoryError" in done.stderr or is_out_of_memory(RuntimeError(done.stderr)):
        return None
    raise RuntimeError(f"training with {settings} ended with exit code {done.returncode}:\n{done.stderr}")


def train_under_limits(batches: int, split: str, limits: dict[str, int]) -> Outcome:
    """Trains a small encoder.

    Args:
        batches: Number of batches.
        split: `whole` batches, single `rows`, or `auto`.
        limits: Batch -> bytes above the start that may be mapped from it on; -1 is before the training.
    """
    torch.set_num_threads(1)
    lightning.seed_everything(7, verbose=False)
    train = TrainConfig(
        epochs=1,
        learning_rate=1e-3,
        batch_size="auto" if split == "auto" else ROWS,
        reference_batch=ROWS,
        dropout=0.0,
        checkpoint_every=1000,
    )
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    config = BertConfig(vocab_size=WORDS + 2, **sizes, id2label=dict(enumerate(LABELS)))
    model, scorer = BertForSequenceClassification(config), TextClassification(LABELS).scorer()
    module = DistillationModule(model, loss=LossConfig(kl=0, ce=1), train=train, metric=scorer)
    module.micro_batches.parts = ROWS if split == "rows" else 1
    splits = Splits(LABELS, draw_examples(ROWS * batches), *(draw_examples(16) for _ in range(3)), {})
    data = TextDataModule(splits, build_tokenizer(), batch_size=ROWS, max_length=128, seed=7, unlabelled=False)
    machine = MachineConfig(accelerator="cpu", precision="32", threads=1, log_every=1)
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        job = TrainingJob(
            label="limited", train=train, machine=machine, precision="32", seed=7, console=Console(quiet=True),
            wandb_folder=folder,
        )  # fmt: skip
        (folder / SCRATCH).mkdir()
        limiter = LimitMemory({int(batch): limit for batch, limit in limits.items()})
        limiter.apply(-1)
        fit_module(module, data, folder, job, [limiter])
        limiter.lift()
        peak = read_kernel_sizes()["VmPeak"] - limiter.start
        return Outcome(read_losses(folder), module.micro_batches.parts, peak)


class LimitMemory(Callback):
    """Limits the address space from the start of some batches on.

    Args:
        limits: Batch -> bytes above those at the start.
    """

    def __init__(self, limits: dict[int, int]):
        self.limits, self.start = limits, read_kernel_sizes()["VmSize"]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Sets the limit of a batch."""
        self.apply(batch_idx)

    def apply(self, batch: int) -> None:
        """Sets the limit of a batch, if there is one."""
        if batch in self.limits:
            resource.setrlimit(resource.RLIMIT_AS, (self.start + self.limits[batch], resource.RLIM_INFINITY))

    def lift(self) -> None:
        """Removes the limit."""
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def read_losses(folder: Path) -> list[float]:
    """Returns the logged loss of each step."""
    (log,) = (folder / LOGS).rglob("metrics.csv")
    with log.open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of numbers."""
    words = ["[PAD]", "[UNK]", *map(str, range(WORDS))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")  # noqa: S106 - no password


def draw_examples(count: int) -> Examples:
    """Returns rows of 120 numbers, each labelled by whether its first one is even."""
    draw = torch.Generator().manual_seed(count)
    numbers = torch.randint(0, WORDS, (count, 120), generator=draw).tolist()
    return Examples([" ".join(map(str, row)) for row in numbers], None, [row[0] % 2 for row in numbers])


if __name__ == "__main__":
    main()
