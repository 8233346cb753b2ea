"""Trainings in which a fixed schedule does worse than one that reads the loss curve.

    python -m benchmarks.training.rate_control --data examples/data/banking77 --output runs/rate-control

Students are layers of MiniLM, trained on labels as in `benchmarks.training.optimizer_scores`, but with trained
embeddings. In the first group the peak rate is far too high: a linear decay is compared with a range test (`find`),
with returns to the last checkpoint (`recoveries`) and with `plateau`, and in longer trainings a constant rate with
`plateau`. In the second group the loss of one batch is multiplied by 10,000, without clipping, or isn't a number. The
first line is the training that neither happens to. Printed are the mean and the standard deviation of the test score
over the seeds, and what the schedules did. Finished trainings are kept in the output's results.json.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.common.results_folder import check_settings
from benchmarks.common.spread import format_percent
from benchmarks.training.optimizer_scores import Experiment, build_parser
from distill.data.batches.loss_mask import loss_counts
from distill.errors import InputError
from distill.train.config import TrainConfig
from pipelines.runs.console import Console
from pipelines.runs.manifest import LOGS

USUAL = 3e-4
CORRUPTED_BATCH = 20  # number of the batch


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        changes: Settings that differ from the usual training.
        loss_factor: Factor on the loss of one batch; None for none.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    loss_factor: float | None = None


HIGH = {"learning_rate": 10 * USUAL}
LONG = HIGH | {"epochs": 10}  # so that the validation stops improving
CASES = {
    "usual": Case(),
    "rate too high, linear": Case(HIGH),
    "rate too high, find": Case(HIGH | {"schedule": "find"}),
    "rate too high, recoveries": Case(HIGH | {"recoveries": 12, "spike": 1.5, "checkpoint_every": 10}),
    "rate too high, plateau": Case(HIGH | {"schedule": "plateau"}),
    "10 epochs, rate too high, constant": Case(LONG | {"schedule": "constant"}),
    "10 epochs, rate too high, plateau": Case(
        LONG | {"schedule": "plateau", "plateau_patience": 0, "plateau_factor": 0.1}
    ),
    "outlier batch, linear": Case({"max_grad_norm": 0.0}, 1e4),
    "outlier batch, recoveries": Case({"max_grad_norm": 0.0, "recoveries": 2, "checkpoint_every": 10}, 1e4),
    "NaN in a batch, linear": Case({}, float("nan")),
    "NaN in a batch, recoveries": Case({"recoveries": 2, "checkpoint_every": 10}, float("nan")),
}


def main() -> None:
    """Trains the students that are missing, and prints the table."""
    parser = build_parser(__doc__, rows=4000, epochs=4, threads=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    check_settings(options.output, options, free=("cases", "seeds"))
    torch.set_num_threads(options.threads)
    experiment, results = Experiment.load(options), load_results(options.output)
    rows = []
    for name in options.cases:
        for seed in options.seeds:
            key = f"{name}, {seed}"
            if key not in results:
                results[key] = run_case(experiment, CASES[name], seed)
                (options.output / "results.json").write_text(json.dumps(results, indent=1))
        runs = [results[f"{name}, {seed}"] for seed in options.seeds]
        scores = [result["test"] for result in runs if result["test"] is not None]
        shown = format_percent(scores) if scores else "ended with an error"
        rows.append((name, shown, runs[0]["what"]))
    Console().table(f"Test score on {options.data}", ("training", "test score, %", "the first seed"), rows)


def load_results(output: Path) -> dict[str, dict[str, Any]]:
    """Returns the results of earlier calls."""
    file = output / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    return results


def run_case(experiment: Experiment, case: Case, seed: int) -> dict[str, Any]:
    """Returns the test score, None if the training ended with an error, and a sentence on what happened."""
    lightning.seed_everything(seed, verbose=False)
    train = replace(TrainConfig(learning_rate=USUAL, epochs=experiment.options.epochs), **case.changes)
    callbacks = [] if case.loss_factor is None else [OutlierBatch(case.loss_factor)]
    with TemporaryDirectory() as directory:
        try:
            fitted = experiment.fit(train, seed, Path(directory), callbacks)
        except InputError as error:
            return {"test": None, "what": str(error)[:160]}
        return {"test": fitted.test, "what": describe_training(Path(directory))}


def describe_training(folder: Path) -> str:
    """Returns the lowest and the highest learning rate in a training's logs, and how often it was started."""
    rows = [row for log in sorted((folder / LOGS).glob("*/metrics.csv")) for row in csv.DictReader(log.open())]
    rates = [float(row["lr"]) for row in rows if row.get("lr")]
    return f"rates {min(rates):.1e} to {max(rates):.1e}, {len(list((folder / LOGS).glob('attempt-*')))} attempts"


class OutlierBatch(Callback):
    """Multiplies the loss of one batch, whose number is counted from the start.

    Args:
        factor: Of the loss.
    """

    def __init__(self, factor: float):
        self.factor = factor

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: dict[str, Any], batch_idx: int) -> None:
        """Sets the share of the batch, which its loss is multiplied by."""
        if trainer.current_epoch == 0 and batch_idx == CORRUPTED_BATCH:
            batch["shares"] = dict.fromkeys(loss_counts(batch), self.factor)


if __name__ == "__main__":
    main()
