"""What a task keeps at each speed: the whole frontier of a data set, over several seeds.

    python -m benchmarks.students.frontier --teacher TEACHER --data texts/ --speedup 4,10,20,40

A teacher is fine-tuned once, with seed 0, and its checkpoint used with every seed, so that the spread is the students'
own. Other seeds need data with a test split, so no test row is trained on. A missing validation split is held out by
each seed, and the teacher was trained on most of its rows; validation scores of other seeds are then too high, test
scores aren't. With each seed, `python -m pipelines.distill --frontier true` trains a student for each speed-up that a
pruned model reaches, and students without attention beside them; other arguments are passed on to it. Finished runs are
skipped when the same command runs again.

A line is printed for each student as it is deployed: its test score as mean and standard deviation over the seeds, the
share of the teacher's score, the measured speed-ups, in how many runs it is within 5 % of the requested one or above
it, megabytes and parameters. The baseline is the majority class, or its counterpart of the task.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.common.command import PassThroughParser, run_command
from benchmarks.common.data_checks import check_shared_teacher
from benchmarks.common.machine import describe_setup
from benchmarks.common.results_folder import check_settings, find_only_checkpoint, read_report
from benchmarks.common.spread import format_percent
from compress.prune.budget import TOLERANCE
from pipelines.reports.headline import read_speedup
from pipelines.reports.schema import ModelEntry, Report
from pipelines.runs.console import Console

HEADER = ("student", "score", "% of the teacher", "speed-up", "as requested", "MB", "parameters")


class Deployed(NamedTuple):
    """A student of one run as it is deployed, and its teacher's test score."""

    entry: ModelEntry
    teacher: float

    @property
    def kept(self) -> float:
        """Share of the teacher's test score."""
        return self.entry["score"] / self.teacher


def main() -> None:
    """Runs the frontiers that are missing, and prints the table."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--speedup", default="4,10,20,40")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", default="runs/frontier")
    options = parser.parse_options()
    output = Path(options.output)
    check_settings(output, options, free=("seeds",))
    arguments = ["--teacher", options.teacher, *describe_run(options)]
    missing = [seed for seed in options.seeds if not (output / f"seed-{seed}" / "report.json").exists()]
    check_shared_teacher(arguments, missing, output)
    teacher = fine_tune(arguments, output / "teacher")
    reports = [run_frontier(options, teacher, output / f"seed-{seed}", seed) for seed in options.seeds]
    console = Console()
    title = f"{options.data}, {reports[0]['metric']}, seeds {', '.join(map(str, options.seeds))}"
    console.table(title, HEADER, build_rows(reports))
    console.say(f"{describe_baseline(reports[0])}; {describe_setup()}")


def fine_tune(arguments: Sequence[str], folder: Path) -> Path:
    """Returns the checkpoint of the teacher of a run with these arguments, fine-tuned with seed 0 if it isn't there."""
    if not list((folder / "teacher").glob("*/model")):
        run_command("distill", *arguments, "--seed", "0", "--until", "teacher", "--output", str(folder))
    return find_only_checkpoint(folder, "teacher")


def run_frontier(options: argparse.Namespace, teacher: Path, folder: Path, seed: int) -> Report:
    """Returns the report of a seed's run, which is run if it isn't finished."""
    if not (folder / "report.json").exists():
        arguments = ["--teacher", str(teacher), *describe_run(options), "--seed", str(seed), "--output", str(folder)]
        run_command("distill", *arguments)
    return read_report(folder)


def describe_run(options: argparse.Namespace) -> list[str]:
    """Returns the arguments of every run but teacher, seed and output."""
    arguments = ["--student", "teacher", "--data", options.data, "--frontier", "true", "--speedup", options.speedup]
    return arguments + list(options.more)


def collect_deployed(reports: Sequence[Report]) -> Mapping[str, list[Deployed]]:
    """Returns name -> the deployed files, one of each report; the teacher is among them."""
    deployed: dict[str, list[Deployed]] = defaultdict(list)
    for report in reports:
        entries = [entry for entry in report["models"] if "validation" in entry]
        teacher = next(entry for entry in entries if entry["name"] == "teacher")
        for entry in entries:
            deployed[entry["name"]].append(Deployed(entry, teacher["score"]))
    return deployed


def build_rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Returns a line for each student, the slowest first."""
    deployed = collect_deployed(reports)
    rows = {name: (mean(list_speeds(students)), build_row(name, students)) for name, students in deployed.items()}
    return [row for _, row in sorted(rows.values(), key=lambda pair: pair[0])]


def build_row(name: str, students: Sequence[Deployed]) -> tuple[str, ...]:
    """Returns the line of a student."""
    speeds = list_speeds(students)
    shares = [each.entry["target"]["share"]["value"] for each in students if "target" in each.entry]
    met = f"{sum(share >= 1 - TOLERANCE for share in shares)} of {len(shares)}" if shares else ""
    first = students[0].entry
    return (
        name,
        format_percent([each.entry["score"] for each in students]),
        format_percent([each.kept for each in students]),
        f"{mean(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f})",
        met,
        f"{first['bytes'] / 1e6:.1f}",
        f"{first['params'] / 1e6:.2f}M",
    )


def list_speeds(students: Sequence[Deployed]) -> list[float]:
    """Returns the measured speed-ups; that of the teacher is 1."""
    return [read_speedup(each.entry) or 1.0 for each in students]


def describe_baseline(report: Report) -> str:
    """Returns the score of the constant answer."""
    baseline = report.get("baseline")
    if baseline is None:
        return "no constant answer is scored"
    return f"{baseline['answer']}: {json.dumps(baseline['scores'])}"


if __name__ == "__main__":
    main()
