"""Steps in which optimizers reach the final KL divergence of AdamW, each at the best of as many learning rates.

    python -m benchmarks.tasks.small_lm --config benchmarks/tasks/small-lm.yaml --output runs/small-lm
    python -m benchmarks.training.optimizer_steps --lm runs/small-lm --output runs/optimizer-steps

The students are those of `benchmarks.cache.cached_students`, trained on the dense teacher. AdamW takes `--steps`; the
others take that number divided by each of `--fewer`, with a whole schedule of their own. The first seed's divergence on
unseen text chooses the rate among multiples of the optimizer's usual one; the other seeds train at it. Printed are mean
and standard deviation of the divergence, and the seconds. Finished trainings are kept in the output's results.jsonl.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch

from benchmarks.cache.cached_students import BATCH, Experiment, build_parser, measure_kl, query_in_float32, train_with
from benchmarks.common.machine import describe_setup
from benchmarks.common.rate_search import train_at_best
from benchmarks.common.results_folder import Results, check_settings
from benchmarks.common.spread import format_spread
from distill.data.batches.batches import TrainBatches
from distill.losses.config import LossConfig
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer
from distill.train.optimizer_kinds import OPTIMIZERS
from pipelines.runs.console import Console

REFERENCE = "adamw"


class Result(TypedDict):
    """A line of results.jsonl."""

    optimizer: str
    steps: int
    factor: float
    seed: int
    rate: float
    kl: float
    seconds: float


def main() -> None:
    """Trains the students that are missing, and prints the table."""
    parser = build_parser(__doc__, "runs/optimizer-steps")
    parser.add_argument("--names", nargs="+", choices=OPTIMIZERS, default=["muon", "soap"], help="beside AdamW")
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 2.0, 4.0], help="of the usual rate")
    parser.add_argument(
        "--fewer", nargs="+", type=float, default=[1.0, 1.3], help="the other optimizers take --steps divided by each"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    check_settings(Path(options.output), options, free=("names", "seeds", "fewer"))
    comparison = Comparison(options)
    for name, steps in list_trainings(options):
        train = partial(comparison.train, name, steps)
        train_at_best(train, options.factors, options.seeds, lambda result: -result["kl"])
    comparison.print_table()


def list_trainings(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Returns (optimizer, steps) of all trainings."""
    others = [(name, round(options.steps / fewer)) for name in options.names for fewer in options.fewer]
    return [(REFERENCE, options.steps), *others]


class Comparison:
    """The teacher, its text, and the results so far.

    Args:
        options: The command's arguments.
    """

    def __init__(self, options: argparse.Namespace):
        self.options, self.console = options, Console()
        self.experiment = Experiment.load(options, self.console)
        self.results: Results[Result] = Results(Path(options.output))

    def train(self, name: str, steps: int, factor: float, seed: int) -> Result:
        """Returns the result of a training, which is run if it isn't known."""
        known = self.results.find(optimizer=name, steps=steps, factor=factor, seed=seed)
        return self.results.add(self._train(name, steps, factor, seed)) if known is None else known

    def _train(self, name: str, steps: int, factor: float, seed: int) -> Result:
        rate = factor * TrainConfig(optimizer=name).choose_rate()
        config = TrainConfig(optimizer=name, learning_rate=rate, dropout=0.0)
        student = self.experiment.build_student(seed)
        module = DistillationModule(student, loss=LossConfig(kl=1, temperature=1), train=config)
        teacher = self.experiment.teacher
        signals = query_in_float32(OnlineTeacher(teacher, device=teacher.device))
        batches = TrainBatches(self.experiment.data, BATCH, 0, seed=0, signals=signals)
        optimizer = build_optimizer(student, (), config)
        label = f"{name}, rate {rate:.2g}, seed {seed}"
        seconds = train_with([optimizer], [module], batches, steps, label, self.console)
        return Result(
            optimizer=name, steps=steps, factor=factor, seed=seed, rate=rate,
            kl=measure_kl(student, teacher, self.experiment.dev), seconds=seconds,
        )  # fmt: skip

    def print_table(self) -> None:
        """Prints mean and spread over the seeds of each optimizer and number of steps at its best rate."""
        rows = []
        for name, steps in list_trainings(self.options):
            runs = [result for result in self.results.all if (result["optimizer"], result["steps"]) == (name, steps)]
            runs = [result for result in runs if result["seed"] in self.options.seeds]
            first = [result for result in runs if result["seed"] == self.options.seeds[0]]
            best = min(first, key=lambda result: result["kl"])
            chosen = [result for result in runs if result["factor"] == best["factor"]]
            seconds = statistics.median(result["seconds"] for result in chosen)
            spread = format_spread([result["kl"] for result in chosen], ".4f")
            rows.append((name, str(steps), f"{best['rate']:.2g}", spread, f"{seconds:.0f}"))
        self.console.say(f"{describe_setup()}, {self.options.device}, {self.options.threads} threads")
        header = ("optimizer", "steps", "rate", "KL from the teacher", "seconds")
        self.console.table(f"Divergence on unseen text, {len(self.options.seeds)} seeds", header, rows)


if __name__ == "__main__":
    main()
