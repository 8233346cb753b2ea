"""Students with zeros in their weights: the accuracy that they keep, and their speed on each runtime.

    python -m benchmarks.pruning.sparse_students --teacher runs/demo/teacher/KEY/model --data examples/data/banking77

All students are trained on the same batches of a classification data set, on the teacher's cached logits: a dense one,
and sparse ones that reach their pattern by the gradual schedule. 4x1 are blocks of four outputs at one input, which
Intel's papers call 1x4. Finished students are kept in the output folder, which is that of one teacher and one data set.

Printed are each student's share of zeros and test accuracy; and per runtime and student the test accuracy, the median
latency (10th to 90th percentile) in ms of single texts and of batches of 32, and the speedup over the dense student.
All students of a runtime alternate in one measurement. The dense student is the baseline; its second copy shows the
noise.
OpenVINO and NNCF are measured if they are installed.
"""

import argparse
import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.common.machine import describe_setup
from benchmarks.common.results_folder import check_settings
from benchmarks.pruning.logit_check import check_logits
from benchmarks.pruning.sparse_runtimes import RUNTIMES, LogitsRunner, StudentFiles, UnavailableError, compute_logits
from benchmarks.training.logit_experiment import MAX_LENGTH, LogitExperiment
from benchmarks.training.logit_training import collate_arrays, compute_all_logits
from compress.measure.latency import Latency, TimedInputs, measure_latency
from compress.sparsity.config import SparsityConfig
from compress.sparsity.layers import compute_zero_shares
from compress.sparsity.training import SparseTraining, prepare_sparse
from distill.data.batches.batches import epoch_order
from distill.data.config import DataConfig
from distill.student.build import build_student
from distill.train.config import TrainConfig
from distill.train.optimizer import set_dropout
from pipelines.runs.console import Console

PATTERNS = {
    "dense": SparsityConfig(),
    "2:4": SparsityConfig(pattern="2:4"),
    "80%": SparsityConfig(pattern="unstructured", amount=0.8),
    "80% 4x1": SparsityConfig(pattern="4x1", amount=0.8),
}
COPY = "dense, second copy"
TRAINING_BATCH = 32
SHAPES = {1: 100, 32: 8}  # rows per batch -> batches measured
SMALLEST_GAIN = 0.05  # a smaller one can't be distinguished from noise
HEADER = ("runtime", "student", "test accuracy", "batch 1 ms", "speedup", "batch 32 ms", "speedup")


def main() -> None:
    """Trains the students that are missing, measures all on each runtime and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder of a classifier trained on the data")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--student", default="layers=2")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--rounds", type=int, default=10, help="calls of each batch and student")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="runs/sparse-students")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.getLogger().setLevel(logging.ERROR)  # the quantizer's advice
    torch.set_num_threads(options.threads)
    console, experiment = Console(), Experiment(options)
    models = {name: experiment.train_student(name, console) for name in PATTERNS}
    print_accuracy(console, experiment, models)
    models[COPY] = copy.deepcopy(models["dense"])
    rows = [row for runtime in RUNTIMES for row in measure_runtime(runtime, experiment, models, console)]
    console.table(f"Latency, {options.threads} threads, medians; speedups are over the dense student", HEADER, rows)
    console.say(f"{describe_setup()}, {options.rounds} rounds")


class Experiment(LogitExperiment):
    """The students and the folder of their files."""

    def __init__(self, options: argparse.Namespace):
        check_settings(Path(options.output), options, free=("student", "epochs", "learning_rate", "rounds", "threads"))
        data = DataConfig(path=options.data, max_length=MAX_LENGTH, validation_fraction=0.05)
        super().__init__(options.teacher, data)
        self.options = options
        name = f"{options.student}-{options.epochs}-{options.learning_rate:g}"
        self.folder = Path(options.output) / name.replace(",", "-")

    def train_student(self, name: str, console: Console) -> PreTrainedModel:
        """Returns the trained student with a pattern, from its folder if it is there."""
        folder = self.folder / name / "student"
        if not (folder / "config.json").exists():
            self._fit_student(name, console).save_pretrained(folder)
        student: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        student.eval()
        return student

    def _fit_student(self, name: str, console: Console) -> PreTrainedModel:
        """Trains with AdamW on the KL divergence from the teacher's cached logits."""
        options = self.options
        train = TrainConfig(epochs=options.epochs, learning_rate=options.learning_rate, batch_size=TRAINING_BATCH)
        orders = [epoch_order(self.train.lengths, TRAINING_BATCH, 0, epoch) for epoch in range(options.epochs)]
        batches = [batch for order in orders for batch in order]
        student = build_student(self.teacher, options.student).train()
        set_dropout(student, 0.0)
        student.get_input_embeddings().requires_grad_(False)
        sparsity = prepare_sparsity(student, name, len(batches))
        targets = self.folder / "teacher.npy"
        return self.fit(student, train, batches, targets, f"training {name}", console, sparsity)

    def select_batches(self, rows: int, count: int) -> list[TimedInputs]:
        """Returns random batches of test texts, padded to their longest."""
        chosen = np.random.default_rng(0).permutation(len(self.test))[: rows * count].reshape(-1, rows)
        return [collate_arrays(self.test, batch, self.pad_id) for batch in chosen]

    def describe_accuracy(self, run: LogitsRunner) -> str:
        """Returns the accuracy of a student on a runtime, on the test split in percent."""
        logits = compute_all_logits(run, self.test, self.pad_id)
        return f"{float((logits.argmax(-1) == self.test.labels).mean()):.2%}"


def prepare_sparsity(student: PreTrainedModel, name: str, steps: int) -> SparseTraining | None:
    """Returns the training to a pattern between a tenth and six tenths of the steps; None for a dense student."""
    config = PATTERNS[name]
    return prepare_sparse(student, config.build_schedule(steps)) if config.pattern else None


def print_accuracy(console: Console, experiment: Experiment, models: Mapping[str, PreTrainedModel]) -> None:
    """Prints each model's share of zeros and test accuracy in PyTorch."""
    rows = []
    for name, model in {"teacher": experiment.teacher, **models}.items():
        zeros = float(np.mean(list(compute_zero_shares(model).values())))
        rows.append((name, f"{zeros:.1%}", experiment.describe_accuracy(partial(compute_logits, model))))
    options = experiment.options
    title = f"{options.student} after {options.epochs} epochs, {len(experiment.test)} test texts"
    console.table(title, ("model", "zeros in the layers", "test accuracy"), rows)


@dataclass(frozen=True)
class RuntimeRunners:
    """The students that a runtime can run, and why it can't run the others."""

    runners: Mapping[str, LogitsRunner]
    reasons: Mapping[str, str]


def build_runners(runtime: str, students: StudentFiles) -> RuntimeRunners:
    """Opens all students on a runtime."""
    runners: dict[str, LogitsRunner] = {}
    reasons: dict[str, str] = {}
    for name in students.models:
        try:
            runners[name] = RUNTIMES[runtime].open(students, name)
        except UnavailableError as reason:
            reasons[name] = str(reason)
    return RuntimeRunners(runners, reasons)


def measure_runtime(
    runtime: str, experiment: Experiment, models: Mapping[str, PreTrainedModel], console: Console
) -> list[tuple[str, ...]]:
    """Returns a row per student: its accuracy and latencies, or the reason why the runtime can't run it."""
    options, is_exact = experiment.options, RUNTIMES[runtime].is_exact
    samples = experiment.select_batches(1, SHAPES[1])
    students = StudentFiles(models, experiment.tokenizer, experiment.folder, samples, options.threads)
    loaded = build_runners(runtime, students)
    unavailable = [(runtime, name, reason, *[""] * 4) for name, reason in loaded.reasons.items()]
    if is_exact:
        for name, run in loaded.runners.items():
            check_logits(f"{runtime}, {name}", run, partial(compute_logits, models[name]), samples[:20])
    if set(loaded.runners) <= {"dense", COPY}:
        return unavailable
    latencies = {}
    for rows, count in SHAPES.items():
        inputs = dict.fromkeys(loaded.runners, experiment.select_batches(rows, count))
        latencies[rows] = measure_latency(loaded.runners, inputs, rounds=options.rounds, threads=options.threads)
        console.say(f"  {runtime}: batch {rows} measured, median length {latencies[rows]['dense'].length}")
        console.say(f"    {describe_gains(latencies[rows])}")
    measured = []
    for name, run in loaded.runners.items():
        accuracy = "as above" if is_exact or name == COPY else experiment.describe_accuracy(run)
        measured.append((runtime, name, accuracy, *format_latencies(latencies, name)))
    return measured + unavailable


def describe_gains(latencies: Mapping[str, Latency]) -> str:
    """Returns which students the zeros made faster, by more than the dense student differs from its copy.

    The median and the fastest tenth must both be faster: on a busy machine either alone is misleading.
    """
    dense = latencies["dense"]
    ratios = {
        name: (dense.median_ms / each.median_ms, dense.p10_ms / each.p10_ms)
        for name, each in latencies.items()
        if name != "dense"
    }
    noise = max(SMALLEST_GAIN, *(2 * abs(ratio - 1) for ratio in ratios.pop(COPY)))
    gains = [f"{name} {pair[0]:.2f}x" for name, pair in ratios.items() if min(pair) > 1 + noise]
    losses = [f"{name} {pair[0]:.2f}x" for name, pair in ratios.items() if max(pair) < 1 / (1 + noise)]
    parts = [f"faster with zeros: {', '.join(gains)}" if gains else "no speedup by zeros"]
    parts += [f"slower: {', '.join(losses)}"] if losses else []
    return f"{'; '.join(parts)} (differences below {noise:.0%} are noise)"


def format_latencies(latencies: Mapping[int, Mapping[str, Latency]], name: str) -> list[str]:
    """Returns the cells of a student's latency and speedup for each batch size."""
    cells = []
    for of_batch in latencies.values():
        latency, dense = of_batch[name], of_batch["dense"]
        cells.append(f"{latency.median_ms:.2f} ({latency.p10_ms:.2f}-{latency.p90_ms:.2f})")
        cells.append("" if name == "dense" else f"{dense.median_ms / latency.median_ms:.2f}")
    return cells


if __name__ == "__main__":
    main()
