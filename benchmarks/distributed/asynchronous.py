"""Students of two processes that don't wait for each other in every step, beside synchronous training.

    python -m benchmarks.distributed.asynchronous --data examples/data/banking77 --output runs/asynchronous-banking77

The students are those of `benchmarks.training.optimizer_scores`, trained by AdamW in batches of 32 rows. Compared are
one process (the same mathematics as replicas that average their gradients); replicas that are averaged after every
step; local SGD, DiLoCo and streaming DiLoCo, averaged every `--every` steps; and Hogwild. Each method tries the same
multiples of the usual learning rate; the first seed's validation score chooses, and the other seeds train at the chosen
rate. The first seed trains once more, with one of the two processes slowed down `--slow` times, by sleeping. Printed
are the mean and the standard deviation of the test score over the seeds, what each replica sent, and the seconds of the
first seed's trainings with equal and with unequal processes, from the start of training to its end and without
validation. Finished trainings are kept in the output's results.jsonl. Replicas run on the CPU only.
"""

import argparse
import dataclasses
import time
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypedDict

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from benchmarks.common.rate_search import train_at_best
from benchmarks.common.results_folder import Results, check_settings
from benchmarks.common.spread import format_percent
from benchmarks.training.optimizer_scores import Experiment, build_parser, describe_device
from distill.train.config import TrainConfig
from distill.train.optimizer_kinds import ADAMW_RATE
from pipelines.runs.console import Console
from pipelines.runs.replicas.hogwild import SharedWeights
from pipelines.runs.replicas.replica import Outcome, Replica, load_result
from pipelines.runs.trainer import fit_module, validate_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig
from pipelines.settings.outer_config import OuterConfig
from pipelines.stages.train.replicas import ReplicaJob, run_replicas

ALONE = "one process"


class Method(NamedTuple):
    """A method of training with two processes: a strategy, and its settings with `every` for that of the command."""

    strategy: str
    outer: Mapping[str, Any] = {}


METHODS: Mapping[str, Method | None] = {
    ALONE: None,
    "averaged after every step": Method("local-sgd", {"every": 1}),
    "local-sgd": Method("local-sgd"),
    "diloco": Method("diloco"),
    "diloco, 2 fragments": Method("diloco", {"fragments": 2}),
    "hogwild": Method("hogwild"),
}


class Result(TypedDict):
    """A line of results.jsonl; `slow` is how many times slower the second replica was."""

    method: str
    factor: float
    seed: int
    slow: float
    validation: float
    test: float
    seconds: float
    sent_bytes: int


def main() -> None:
    """Trains the students that are missing, and prints the table of all."""
    parser = build_parser(__doc__, rows=4000, epochs=4, threads=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--factors", nargs="+", type=float, default=[3.0, 10.0, 30.0], help="of the usual rate")
    parser.add_argument("--every", type=int, default=20, help="steps between two averagings")
    parser.add_argument("--slow", type=float, default=3.0, help="how many times slower the slowed process is")
    options = parser.parse_args()
    if options.accelerator != "cpu":
        parser.error(f"--accelerator: expected cpu, which replicas train on, found {options.accelerator}")
    check_settings(options.output, options, free=("methods", "seeds"))
    torch.set_num_threads(options.threads)
    comparison = Comparison(options)
    chosen = {method: comparison.train_all(method) for method in options.methods}
    print_table(chosen, options)


class Comparison:
    """The data, and the results so far.

    Args:
        options: The command's arguments.
    """

    def __init__(self, options: argparse.Namespace):
        self.options, self.results = options, Results[Result](options.output)

    @cached_property
    def experiment(self) -> Experiment:
        """The data and the student's construction."""
        return Experiment.load(self.options)

    def train_all(self, method: str) -> list[Result]:
        """Returns the results of all seeds at the best rate, and of the slowed training where there are replicas."""
        train, seeds = partial(self.train, method), self.options.seeds
        equal = train_at_best(train, self.options.factors, seeds, lambda result: result["validation"])
        slowed = [train(equal[0]["factor"], seeds[0], self.options.slow)] if method != ALONE else []
        return [*equal, *slowed]

    def train(self, method: str, factor: float, seed: int, slow: float = 1.0) -> Result:
        """Returns the result of a training, which is run if it isn't known."""
        known = self.results.find(method=method, factor=factor, seed=seed, slow=slow)
        return self.results.add(self._train(method, factor, seed, slow)) if known is None else known

    def _train(self, method: str, factor: float, seed: int, slow: float) -> Result:
        train = TrainConfig(
            learning_rate=factor * ADAMW_RATE, epochs=self.options.epochs, freeze_embeddings=True,
            checkpoint_every=10**6,
        )  # fmt: skip
        case, kind = {"method": method, "factor": factor, "seed": seed, "slow": slow}, METHODS[method]
        with TemporaryDirectory() as directory:
            if kind is None:
                return Result(**case, **train_alone(self.experiment, train, seed, Path(directory)))  # type: ignore[typeddict-item]
            outer = OuterConfig(**({"every": self.options.every} | dict(kind.outer)))
            if kind.strategy == "hogwild":
                outer = OuterConfig()
            training = ReplicaTraining(self.options, train, seed, self.machine(kind.strategy), outer, slow)
            return Result(**case, **training.run(self.experiment, Path(directory)))  # type: ignore[typeddict-item]

    def machine(self, strategy: str) -> MachineConfig:
        """Returns the machine settings of two replicas."""
        threads = self.options.threads
        return MachineConfig(accelerator="cpu", precision="32", threads=threads, devices=2, strategy=strategy)


def train_alone(experiment: Experiment, train: TrainConfig, seed: int, folder: Path) -> dict[str, Any]:
    """Returns scores and seconds of a training on one process, timed as replicas time theirs."""
    module, data = experiment.build(train, seed)
    job, clock = experiment.describe_training(train, seed, folder), TrainingClock()
    fit_module(module, data, folder, job, [clock])
    metrics = validate_module(module, data, machine=job.machine, precision=job.precision)
    test = experiment.score(module, data)
    return {"validation": metrics["val/score"], "test": test, "seconds": clock.seconds, "sent_bytes": 0}


class TrainingClock(Callback):
    """Takes the seconds from the start of training to its end, and leaves out validation, as replicas do."""

    def __init__(self) -> None:
        self.seconds, self.start = 0.0, 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves out validation."""
        trainer.limit_val_batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self.start = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self.seconds = time.perf_counter() - self.start


@dataclasses.dataclass(frozen=True)
class ReplicaTraining:
    """A training by two replicas; called in the process of each.

    Args:
        options: The command's arguments.
        train: Settings of the training.
        seed: Of the student and the order of the data.
        machine: Strategy and number of replicas.
        outer: How they are averaged.
        slow: How many times slower the second one is.
    """

    options: argparse.Namespace
    train: TrainConfig
    seed: int
    machine: MachineConfig
    outer: OuterConfig
    slow: float

    def __call__(self, replica: Replica) -> None:
        """Trains one replica."""
        torch.set_num_threads(self.options.threads)
        module, data = Experiment.load(self.options).build(self.train, self.seed)
        is_slowed = self.slow > 1 and replica.index == 1
        job = TrainingJob(
            label=self.machine.strategy, train=self.train, machine=self.machine, precision="32", seed=self.seed,
            console=Console(quiet=True), wandb_folder=replica.folder,
        )  # fmt: skip
        ReplicaJob(replica, self.outer, job).fit(module, data, [Slowdown(self.slow)] if is_slowed else [])

    def run(self, experiment: Experiment, shared: Path) -> dict[str, Any]:
        """Returns scores, seconds and bytes of the training; the seconds are those of the slower replica."""
        module, data = experiment.build(self.train, self.seed)
        if self.machine.strategy == "hogwild":
            SharedWeights(shared, module).create()
        outcomes: dict[int, Outcome] = run_replicas(
            self, shared, self.machine, Console(quiet=True), ["benchmarks.distributed.asynchronous"]
        )
        load_result(shared, min(outcomes), module)
        metrics = validate_module(module, data, machine=self.machine, precision="32")
        return {
            "validation": metrics["val/score"],
            "test": experiment.score(module, data),
            "seconds": max(each["seconds"] for each in outcomes.values()),
            "sent_bytes": max(each["sent_bytes"] for each in outcomes.values()),
        }


class Slowdown(Callback):
    """Callback that makes each batch take `factor` times as long, by sleeping."""

    def __init__(self, factor: float):
        self.factor, self.start = factor, 0.0

    def on_train_batch_start(self, *arguments: object) -> None:
        """Starts the clock."""
        self.start = time.perf_counter()

    def on_before_optimizer_step(self, *arguments: object) -> None:
        """Sleeps, before the step after which replicas wait for each other."""
        time.sleep((self.factor - 1) * (time.perf_counter() - self.start))


def print_table(chosen: Mapping[str, list[Result]], options: argparse.Namespace) -> None:
    """Prints scores, bytes and seconds of each method at its rate."""
    console, rows = Console(), []
    console.say(f"{describe_device(options)}, torch {torch.__version__}, {options.threads} thread(s) a process")
    for method, results in chosen.items():
        equal, slowed = ([each for each in results if (each["slow"] > 1) is is_slow] for is_slow in (False, True))
        seconds = equal[0]["seconds"]
        rows.append(
            (method, f"{equal[0]['factor'] * ADAMW_RATE:.2g}", format_percent([each["test"] for each in equal]),
             f"{equal[0]['sent_bytes'] / 1e6:,.0f}", f"{seconds:.1f}",
             *((f"{slowed[0]['seconds']:.1f}", f"{slowed[0]['seconds'] / seconds:.2f}") if slowed else ("", "")))
        )  # fmt: skip
    slowed_seconds = f"seconds, one process {options.slow:g}x slower"
    header = ("method", "rate", "test score, %", "MB sent", "seconds", slowed_seconds, "ratio")
    console.table(f"Two processes on {options.data}, {len(options.seeds)} seeds", header, rows)


if __name__ == "__main__":
    main()
