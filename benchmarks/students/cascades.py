"""Cascades beside single students at equal mean latency, from the students of finished frontiers.

    python -m benchmarks.students.frontier --data sentence_polarity/ … --output runs/frontier/polarity
    python -m benchmarks.students.cascades --frontier runs/frontier/polarity --data sentence_polarity/

For each seed of `benchmarks.students.frontier` and each of its students with a requested speed, `python -m
pipelines.cascade` chooses the cascade of all students of that seed with the best validation score at that student's
mean latency. Both are scored on the test split and timed on the same texts. Other arguments, such as those of the
validation split, have to be those of the frontier and are passed on. Finished cascades are skipped when the same
command runs again.

Printed are, for each student, its test score and the cascade's as mean and standard deviation over the seeds, the gain
seed by seed, both mean latencies, and the members of the cascade of the first seed with the shares that they answer.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.command import PassThroughParser, run_command
from benchmarks.common.machine import describe_setup
from benchmarks.common.results_folder import check_settings, find_only, find_only_checkpoint, read_report
from benchmarks.common.spread import format_gain, format_percent, format_spread
from pipelines.runs.console import Console

HEADER = ("student", "alone", "cascade", "gain", "ms alone", "ms", "members")


class Compared(NamedTuple):
    """A student of one seed and the cascade at its mean latency: entries of evaluation.json."""

    student: dict[str, Any]
    cascade: dict[str, Any]


def main() -> None:
    """Chooses the cascades that are missing, and prints the table."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--frontier", type=Path, required=True, help="output folder of benchmarks.students.frontier")
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/cascades"))
    options = parser.parse_options()
    options.frontier = str(options.frontier)
    check_settings(options.output, options, free=("seeds",))
    rows = [build_row(name, compare_all(options, name)) for name in list_requested(options)]
    console = Console()
    console.table(f"{options.data}, seeds {', '.join(map(str, options.seeds))}", HEADER, rows)
    console.say(describe_setup())


def list_requested(options: argparse.Namespace) -> list[str]:
    """Returns the students with a requested speed that every seed has, in the order of the first seed's report."""
    reports = [read_report(Path(options.frontier) / f"seed-{seed}") for seed in options.seeds]
    first, *others = ([entry["name"] for entry in report["models"] if "target" in entry] for report in reports)
    return [name for name in first if all(name in names for names in others)]


def compare_all(options: argparse.Namespace, name: str) -> list[Compared]:
    """Returns the student and its cascade of every seed."""
    return [compare(options, name, seed) for seed in options.seeds]


def compare(options: argparse.Namespace, name: str, seed: int) -> Compared:
    """Returns a student and the cascade at its mean latency."""
    file = options.output / f"{name}-{seed}.json"
    if not file.exists():
        milliseconds = measure_means(options, seed)[name]
        evaluation = run_cascade(options, seed, "--latency-ms", f"{milliseconds:.6f}")
        file.write_text(json.dumps(evaluation))
    models = {entry["name"]: entry for entry in json.loads(file.read_text())["models"]}
    return Compared(models[name], models["cascade"])


def measure_means(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Returns each student's mean latency on validation texts, as the cascades of its seed are chosen by it."""
    folder = name_folder(options, seed) / "member-logits"
    if not list(folder.glob("*/manifest.json")):
        run_cascade(options, seed, "--min-score-share", "0.01")  # any cascade: the first one measures the students
    manifest = find_only(folder.parent, folder.name, "manifest.json", "measurement of the students")
    milliseconds: dict[str, float] = json.loads(manifest.read_text())["metrics"]["milliseconds"]
    return milliseconds


def run_cascade(options: argparse.Namespace, seed: int, *aim: str) -> dict[str, Any]:
    """Returns the evaluation of the cascade of a seed's students with an aim."""
    run = Path(options.frontier) / f"seed-{seed}"
    names = dict.fromkeys(entry["name"] for entry in read_report(run)["models"] if entry["name"] != "teacher")
    models = ",".join(str(run / name) for name in names)
    teacher = find_only_checkpoint(Path(options.frontier) / "teacher", "teacher")
    arguments = ["--models", models, "--teacher", str(teacher), "--data", options.data, "--seed", str(seed)]
    folder = name_folder(options, seed)
    run_command("cascade", *arguments, "--dynamic", "true", *aim, *options.more, "--output", str(folder))
    evaluation: dict[str, Any] = json.loads((folder / "cascade" / "evaluation.json").read_text())
    return evaluation


def name_folder(options: argparse.Namespace, seed: int) -> Path:
    """Returns the folder of a seed's cascades, whose stages they share."""
    folder: Path = options.output / f"seed-{seed}"
    return folder


def build_row(name: str, pairs: Sequence[Compared]) -> tuple[str, ...]:
    """Returns the line of a student."""
    gains = [100 * (each.cascade["score"] - each.student["score"]) for each in pairs]
    shares = pairs[0].cascade["shares"]
    return (
        name,
        format_percent([each.student["score"] for each in pairs]),
        format_percent([each.cascade["score"] for each in pairs]),
        format_gain(gains),
        format_spread([each.student["mean_ms"] for each in pairs], ".3f"),
        format_spread([each.cascade["mean_ms"] for each in pairs], ".3f"),
        ", ".join(f"{member} {share:.0%}" for member, share in shares.items()),
    )


if __name__ == "__main__":
    main()
