"""Wrong labels that a teacher finds, beside cleanlab's confident learning on the same probabilities.

    pip install -c constraints.txt -e '.[dev]'
    python -m benchmarks.data.label_errors --data examples/data/banking77 --output runs/label-errors
    python -m benchmarks.data.label_errors --data examples/data/banking77 --noise similar --output runs/similar-labels

A tenth of the training split's labels are replaced by a seed: by any other class, or with `--noise similar` by one of
the three with the nearest mean TF-IDF vectors. MiniLM is trained on two thirds of the rows, three times, and judges the
rest. Printed are, for each method, the rows that it doubts, the share of the wrong labels among the doubted (precision)
and of the doubted among the wrong ones (recall). Labels that were already wrong in the data count as right ones.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from cleanlab.filter import find_label_issues
from sklearn.feature_extraction.text import TfidfVectorizer

from benchmarks.common.plans import read_plan
from benchmarks.common.results_folder import check_settings
from benchmarks.common.tables import write_table
from benchmarks.data.cleaning import TEACHER, read_rows
from benchmarks.data.damage import DamagedRow, Shares, damage_rows
from distill.data.clean.label_errors import draw_folds, estimate_label_errors
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from pipelines.settings.task_settings import run_task_arguments
from pipelines.settings.this_machine import find_processor
from pipelines.stages.prepare.clean import DOUBTED
from pipelines.stages.prepare.data import data_stage, read_data, read_task
from pipelines.stages.prepare.fold_logits import compute_out_of_fold_logits
from pipelines.stages.train.precision import select_precision

WRONG = 0.1  # of the labels
NEAREST = 3
FILTERS = {"cleanlab": "prune_by_noise_rate", "cleanlab, stricter (`both`)": "both"}


def main() -> None:
    """Puts wrong labels in, computes the logits if they aren't there, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--noise", choices=("any", "similar"), default="any", help="class of a wrong label")
    parser.add_argument("--teacher-epochs", type=int, default=2)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    check_settings(options.output, options, free=("threads",))
    torch.set_num_threads(options.threads)
    rows = mislabel_rows(read_rows(Path(options.data), "train"), options.noise)
    labels, wrong, logits = compute_logits(options, rows)
    is_right = (logits.argmax(1).numpy() == labels)[~wrong].mean()
    table = [
        (name, f"{doubted.sum():,}", f"{wrong[doubted].mean():.1%}", f"{doubted[wrong].mean():.1%}")
        for name, doubted in find_doubted(labels, logits).items()
    ]
    console = Console()
    console.say(
        f"{wrong.sum():,} of {len(wrong):,} labels are wrong; the teacher agrees with {is_right:.1%} of the rest"
    )
    title = f"{Path(options.data).name}, wrong labels of {options.noise} classes, {options.teacher_epochs} epochs"
    console.table(f"{title}, {find_processor()}", ("method", "doubted", "precision", "recall"), table)


def mislabel_rows(rows: Sequence[tuple[str, str]], noise: str) -> list[DamagedRow]:
    """Returns the (text, label) rows in random order, a tenth of them with a wrong label."""
    damaged = damage_rows(*zip(*rows, strict=True), Shares(typos=0, encodings=0, copies=0, labels=WRONG), 0)
    if noise == "similar":
        nearest, rng = find_nearest_classes(rows), random.Random(0)  # noqa: S311
        for row in damaged:
            if row.is_mislabelled:
                row.label = rng.choice(nearest[rows[row.source][1]])
    return damaged


def find_nearest_classes(rows: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns for each class the three with the most similar mean TF-IDF vectors."""
    texts, labels = zip(*rows, strict=True)
    weights = TfidfVectorizer().fit_transform(texts)
    names = sorted(set(labels))
    means = np.stack([np.asarray(weights[np.array(labels) == name].mean(0))[0] for name in names])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    order = np.argsort(-(means @ means.T - 2 * np.eye(len(names))), axis=1)[:, :NEAREST]
    return {name: [names[each] for each in order[number]] for number, name in enumerate(names)}


def compute_logits(
    options: argparse.Namespace, rows: Sequence[DamagedRow]
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Returns (label, whether it is wrong, out-of-fold logits) of the training rows of the run's data stage."""
    data = options.output / "data"
    write_table(data / "train.jsonl", [{"text": row.text, "label": row.label} for row in rows])
    arguments = [*TEACHER.split(), f"--teacher_train.epochs={options.teacher_epochs}", f"--threads={options.threads}"]
    arguments += ["--student=layers=2", f"--data={data}", f"--output={options.output / 'run'}", "--data.clean=labels"]
    plan = read_plan(arguments)
    run = Run(Path(plan.settings.output), 0, Console())
    stage = data_stage(run, plan.settings.data, plan.task, run_task_arguments(plan.settings, plan.task))
    splits, precision = read_data(stage), select_precision(run, plan, stage)
    folds = draw_folds(splits.train.labels, options.folds, 0)
    logits = compute_out_of_fold_logits(run, plan, splits, read_task(stage), folds, precision, options.output / "folds")
    is_wrong = {(row.text.strip(), row.label): row.is_mislabelled for row in rows}
    pairs = zip(splits.train.texts, splits.train.labels, strict=True)
    wrong = np.array([is_wrong[text.strip(), splits.labels[label]] for text, label in pairs])
    return np.array(splits.train.labels), wrong, logits


def find_doubted(labels: np.ndarray, logits: torch.Tensor) -> dict[str, np.ndarray]:
    """Returns for each method which labels it doubts, bool [rows]."""
    probabilities = logits.softmax(-1).numpy()
    doubted = {"`labels`": estimate_label_errors(labels.tolist(), logits) > DOUBTED}
    for name, kind in FILTERS.items():
        doubted[name] = np.asarray(find_label_issues(labels, probabilities, filter_by=kind, n_jobs=1), bool)
    return doubted


if __name__ == "__main__":
    main()
