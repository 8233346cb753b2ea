"""Normalizations of a student: what each costs and gives.

    python -m benchmarks.students.normalizations --teacher runs/demo/teacher/KEY/model --data examples/data/banking77
    python -m benchmarks.students.normalizations --teacher ... --student fresh,layers=3,hidden=192 --rates 3e-4 1e-3

Every student is built from the teacher with the same spec and another `norm=`, and trained on the teacher's cached
logits of the same batches. Each kind tries the same learning rates with the first seed, and trains with the one of the
best validation accuracy from every seed. Printed are parameters, bytes of the ONNX file for ONNX Runtime, the latency
of single texts with that file as the median over the texts of each text's fastest call, its ratio to the stock
student's in the same measurement, and the test accuracy: mean and standard deviation over the seeds. The ratio of a
second copy of the stock student shows the noise. Finished trainings are kept in the output folder, which is that of one
teacher and one data set.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.common.machine import describe_setup
from benchmarks.common.rate_search import train_at_best
from benchmarks.common.results_folder import check_settings
from benchmarks.common.spread import format_percent
from benchmarks.training.logit_experiment import LogitExperiment, build_data_config, build_parser
from benchmarks.training.logit_training import collate_arrays
from compress.export.common.fold import fold_norms
from compress.export.common.source import Source
from compress.export.common.targets import find_target
from compress.export.onnx.graph import ONNX_FILE
from compress.export.runtimes import build_opener
from compress.export.write import write_targets
from compress.measure.latency import Latency, summarize_times
from compress.measure.process import open_timing_process
from distill.checkpoint.custom_models import load_model_folder, save_model_folder
from distill.checkpoint.norm_kinds import LAYERNORM, NORM_KINDS
from distill.data.batches.batches import epoch_order
from distill.student.build import build_student
from distill.train.config import TrainConfig
from distill.train.optimizer import set_dropout
from pipelines.runs.console import Console

TRAINING_BATCH, TIMED_TEXTS = 32, 100
COPY = "stock, second copy"
RUNTIME = "onnxruntime"
HEADER = ("norm", "parameters", "bytes", "ms", "of stock", "rate", "validation", "test accuracy")


@dataclass(frozen=True)
class Training:
    """A finished training.

    Args:
        kind: Normalization of the student.
        rate: Learning rate.
        seed: Of the student's random weights and of the order of the batches.
        validation, test: Accuracy on these splits.
    """

    kind: str
    rate: float
    seed: int
    validation: float
    test: float


def main() -> None:
    """Trains the students that are missing, measures one of each kind and prints the table."""
    parser = build_parser(__doc__, epochs=12)
    parser.add_argument("--student", default="layers=3", help="a spec without norm=")
    parser.add_argument("--kinds", nargs="+", choices=NORM_KINDS, default=list(NORM_KINDS))
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 5e-4, 1e-3], help="tried for each kind")
    parser.add_argument("--rows", type=int, default=0, help="training texts; 0: all")
    parser.add_argument("--output", default="runs/normalizations")
    options = parser.parse_args()
    options.kinds = list(dict.fromkeys([LAYERNORM, *options.kinds]))  # the first is what the others are compared with
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    console, experiment = Console(), Experiment(options)
    trainings = {kind: experiment.train_all(kind, console) for kind in options.kinds}
    models = {kind: experiment.load_student(each[0]) for kind, each in trainings.items()}
    latencies, sizes = experiment.measure(models)
    rows = [
        describe_kind(kind, trainings[kind], models[kind], sizes[kind], latencies[kind], latencies[options.kinds[0]])
        for kind in options.kinds
    ]
    rows.append((COPY, "", "", *format_latency(latencies[COPY], latencies[options.kinds[0]]), "", "", ""))
    counts = f"{options.epochs} epochs, {len(options.rates)} rates, {len(options.seeds)} seeds"
    console.table(f"{options.student}, {counts}, {RUNTIME}", HEADER, rows)
    console.say(f"{describe_setup()}, {options.threads} threads")


class Experiment(LogitExperiment):
    """The trainings and the folder of their results."""

    def __init__(self, options: argparse.Namespace):
        free = ("kinds", "student", "epochs", "seeds", "rates", "rounds", "threads")
        check_settings(Path(options.output), options, free=free)
        super().__init__(options.teacher, build_data_config(options))
        self.options = options
        count = options.rows or len(self.train)
        self.chosen = np.sort(np.random.default_rng(0).permutation(len(self.train))[:count])
        self.folder = Path(options.output) / f"{options.student}-{options.epochs}".replace(",", "-")

    def train_all(self, kind: str, console: Console) -> list[Training]:
        """Returns the trainings of a kind from every seed, at the rate with the best validation accuracy."""
        train = partial(self.train_student, kind, console=console)
        return train_at_best(train, self.options.rates, self.options.seeds, lambda each: each.validation)

    def train_student(self, kind: str, rate: float, seed: int, console: Console) -> Training:
        """Returns a training, from its folder if it is there."""
        folder = self.name_folder(kind, rate, seed)
        file = folder / "training.json"
        if not file.exists():
            student = self._fit_student(kind, rate, seed, console)
            save_model_folder(student, folder)
            scores = (self.measure_score(student, part) for part in (self.validation, self.test))
            file.write_text(json.dumps(asdict(Training(kind, rate, seed, *scores))))
        return Training(**json.loads(file.read_text()))

    def name_folder(self, kind: str, rate: float, seed: int) -> Path:
        """Returns the folder of a training."""
        return self.folder / f"{kind}-{rate:g}-{seed}"

    def load_student(self, training: Training) -> PreTrainedModel:
        """Returns the student that a training made."""
        return load_model_folder(self.name_folder(training.kind, training.rate, training.seed))

    def _fit_student(self, kind: str, rate: float, seed: int, console: Console) -> PreTrainedModel:
        """Trains with AdamW on the KL divergence from the teacher's cached logits."""
        options = self.options
        train = TrainConfig(epochs=options.epochs, learning_rate=rate, batch_size=TRAINING_BATCH)
        lengths = self.train.lengths[self.chosen]
        orders = [epoch_order(lengths, TRAINING_BATCH, seed, epoch) for epoch in range(options.epochs)]
        batches = [self.chosen[batch] for order in orders for batch in order]
        student = build_student(self.teacher, f"{options.student},norm={kind}", seed).train()
        set_dropout(student, 0.0)
        targets = Path(options.output) / "teacher.npy"
        return self.fit(student, train, batches, targets, f"{kind} {rate:g} {seed}", console)

    def measure(self, models: dict[str, PreTrainedModel]) -> tuple[dict[str, Latency], dict[str, int]]:
        """Returns the latency of each kind's file, and of a copy of the first, and the bytes of the files."""
        folders = {kind: self.folder / "files" / kind for kind in models}
        for kind, model in models.items():
            write_targets(Source(fold_norms(model), self.tokenizer), [find_target(RUNTIME)], folders[kind])
        folders[COPY] = folders[next(iter(models))]
        threads = self.options.threads
        target = find_target(RUNTIME)
        openers = {kind: build_opener(target, folder / RUNTIME, threads) for kind, folder in folders.items()}
        texts = np.random.default_rng(0).permutation(len(self.test))[:TIMED_TEXTS]
        inputs = [collate_arrays(self.test, texts[i : i + 1], self.pad_id) for i in range(len(texts))]
        for batch in inputs:
            batch.setdefault("token_type_ids", np.zeros_like(batch["input_ids"]))
        with open_timing_process(openers, threads) as process:
            times = process.time_rounds(dict.fromkeys(openers, inputs), rounds=self.options.rounds)
        latencies = {kind: summarize_times(each, inputs, threads) for kind, each in times.items()}
        return latencies, {kind: (folder / RUNTIME / ONNX_FILE).stat().st_size for kind, folder in folders.items()}


def describe_kind(
    kind: str, trainings: Sequence[Training], model: PreTrainedModel, size: int, latency: Latency, stock: Latency
) -> tuple[str, ...]:
    """Returns the row of a kind."""
    scores = [format_percent([getattr(each, split) for each in trainings]) for split in ("validation", "test")]
    counts = f"{model.num_parameters():,}", f"{size:,}"
    return (kind, *counts, *format_latency(latency, stock), f"{trainings[0].rate:g}", *scores)


def format_latency(latency: Latency, stock: Latency) -> tuple[str, str]:
    """Returns the median over the texts of the fastest calls in ms, and its ratio to the stock student's."""
    return f"{latency.best_ms:.2f}", f"{latency.best_ms / stock.best_ms:.2f}"


if __name__ == "__main__":
    main()
