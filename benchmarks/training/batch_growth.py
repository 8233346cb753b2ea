"""Seconds in which batches that grow reach the score of a fixed batch, each at the best of as many learning rates.

    python -m benchmarks.training.batch_growth --data examples/data/banking77 --output runs/batch-growth

Students are layers of MiniLM, trained on labels as in `benchmarks.training.optimizer_scores`, but with trained
embeddings and in micro-batches of 8. Compared are 16 rows throughout, 128 throughout, and 16 that grow to at most 128
by schedule or with the gradient's noise scale. The rates are multiples of the usual one; the first seed's validation
score chooses, and the other seeds train at the chosen rate. Printed are the mean and the standard deviation of the test
score over the seeds, and the median seconds of the training, without validation, in all and until the validation score
first reached the mean final one of the fixed batch of 128. Finished trainings are kept in the output's results.jsonl.
Seconds on a busy machine mean nothing.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.common.rate_search import train_at_best
from benchmarks.common.results_folder import Results, check_settings
from benchmarks.common.spread import format_percent
from benchmarks.training.optimizer_scores import Experiment, build_parser, describe_device
from distill.train.config import TrainConfig
from distill.train.optimizer_kinds import ADAMW_RATE
from pipelines.runs.console import Console

LARGEST = "128 rows"  # whose final score is the goal of all
CASES: Mapping[str, Mapping[str, Any]] = {
    "16 rows": {"accumulate": 2},
    LARGEST: {"accumulate": 16},
    "schedule": {"accumulate": 2, "batch_growth": "schedule", "largest_batch": 128},
    "noise": {"accumulate": 2, "batch_growth": "noise", "largest_batch": 128},
}


class Result(TypedDict):
    """A line of results.jsonl: `curve` has the seconds and the validation score at the end of each epoch."""

    case: str
    factor: float
    seed: int
    curve: list[tuple[float, float]]
    test: float


def main() -> None:
    """Trains the students that are missing, and prints the table of all."""
    parser = build_parser(__doc__, rows=3000, epochs=6, threads=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 3.0, 10.0], help="of the usual rate")
    options = parser.parse_args()
    check_settings(options.output, options, free=("cases", "seeds"))
    torch.set_num_threads(options.threads)
    experiment = Experiment.load(options)
    results: Results[Result] = Results(options.output)
    chosen = {case: train_case(experiment, results, case) for case in options.cases}
    print_table(chosen, options)


def train_case(experiment: Experiment, results: Results[Result], case: str) -> list[Result]:
    """Returns the results of all seeds at the rate that was the best for the first one."""
    factors, seeds = experiment.options.factors, experiment.options.seeds
    return train_at_best(
        partial(train_once, experiment, results, case), factors, seeds, lambda result: result["curve"][-1][1]
    )


def train_once(experiment: Experiment, results: Results[Result], case: str, factor: float, seed: int) -> Result:
    """Returns the result of a training, which is run if it isn't known."""
    known = results.find(case=case, factor=factor, seed=seed)
    if known is not None:
        return known
    train = TrainConfig(batch_size=8, learning_rate=factor * ADAMW_RATE, epochs=experiment.options.epochs)
    watch = EpochClock()
    with TemporaryDirectory() as directory:
        fitted = experiment.fit(replace(train, checkpoint_every=10**6, **CASES[case]), seed, Path(directory), [watch])
    return results.add(Result(case=case, factor=factor, seed=seed, curve=watch.curve, test=fitted.test))


class EpochClock(Callback):
    """Takes the seconds of training, without validation, and the validation score at the end of each epoch."""

    def __init__(self) -> None:
        self.curve: list[tuple[float, float]] = []
        self.seconds, self.start = 0.0, 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts the clock."""
        self.start = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stops the clock, unless this is the check of validation before the training."""
        if not trainer.sanity_checking:
            self.seconds += time.perf_counter() - self.start

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Keeps the score, and starts the clock for what is left of the epoch."""
        if not trainer.sanity_checking:
            self.curve.append((self.seconds, float(trainer.callback_metrics["val/score"])))
            self.start = time.perf_counter()


def find_seconds(result: Result, score: float) -> float | None:
    """Returns the seconds after which the validation score was at least `score`; None if it never was."""
    return next((seconds for seconds, curve_score in result["curve"] if curve_score >= score), None)


def print_table(chosen: Mapping[str, list[Result]], options: argparse.Namespace) -> None:
    """Prints scores and seconds of each case at its rate."""
    console, rows = Console(), []
    console.say(f"{describe_device(options)}, torch {torch.__version__}, {options.threads} threads")
    largest = chosen.get(LARGEST)
    goal = statistics.mean(result["curve"][-1][1] for result in largest) if largest else 1.0
    for case, results in chosen.items():
        score = format_percent([result["test"] for result in results])
        reached = [seconds for result in results if (seconds := find_seconds(result, goal)) is not None]
        whole = statistics.median(result["curve"][-1][0] for result in results)
        rows.append(
            (case, f"{results[0]['factor'] * ADAMW_RATE:.2g}", score,
             f"{whole:.1f}", f"{statistics.median(reached):.1f}" if reached else "-", f"{len(reached)}/{len(results)}")
        )  # fmt: skip
    header = (
        "batch",
        "rate",
        "test score, %",
        "seconds",
        f"seconds to {goal:.2%} in validation",
        "seeds that reach it",
    )
    console.table(f"Batches that grow on {options.data}", header, rows)


if __name__ == "__main__":
    main()
