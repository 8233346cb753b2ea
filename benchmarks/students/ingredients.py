"""What each ingredient gives a pruned student: the same speed-ups, with one setting changed at a time.

    python -m benchmarks.students.ingredients --teacher TEACHER --data texts/ --speedup 4,10,20
    python -m benchmarks.students.ingredients --teacher … --data banking77/ --speedup 4,10,15 --variants nested

A teacher is fine-tuned once, with seed 0; other seeds need data with a test split, and validation scores mean less with
them, as in `benchmarks.students.frontier`. All variants of a seed share an output folder, so that the shapes that
`plain` found serve every variant that doesn't influence the search, and students differ by the ingredient alone. Speeds
are measured as in every run. `two steps` prunes plain's slowest student further; `assistant` prunes the teacher to the
same speeds with that student as the teacher. `two teachers` needs `--also`, and `unlabelled` needs `--unlabelled`;
without them they are left out. Other arguments are passed on to `pipelines.distill`; finished runs are skipped when the
same command runs again.

Printed are, for each variant and requested speed-up, the test score as mean and standard deviation over the seeds, the
gain over `plain` seed by seed, the measured speed-up over the fine-tuned teacher, and the minutes of the student's own
stages. The speed-up of a student of `assistant` is that over its own teacher, times that teacher's.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import mean

from benchmarks.common.command import PassThroughParser, run_command
from benchmarks.common.data_checks import check_shared_teacher
from benchmarks.common.machine import describe_setup
from benchmarks.common.results_folder import check_settings, require_entry
from benchmarks.common.spread import format_gain, format_percent, format_spread
from benchmarks.students.frontier import fine_tune
from pipelines.reports.headline import read_speedup
from pipelines.reports.schema import ModelEntry, Report
from pipelines.runs.console import Console

PLAIN, ASSISTANT = "plain", "assistant"
VARIANTS = {
    PLAIN: "",
    "nested": "--nested true",
    "reconstructed": "--prune.reconstruct true",
    "averaged": "--train.ema_decay 0.998",
    "iterative": "--prune.schedule iterative",
    "gradual": "--prune.schedule gradual",
    "learned masks": "--prune.schedule gradual --prune.masks learned",
    "hidden states": "--loss.hidden 1 --loss.hidden_kind cosine",
    "longer": "--epochs {longer}",
    "trained embeddings": "--train.freeze_embeddings false",
    "augmented": "--data.augment contractions,numbers,order,noise --augment.times 4",
    "unlabelled": "--data.unlabelled {unlabelled}",
    "two teachers": "--teacher.additional {also}",
    "two steps": "",
    ASSISTANT: "",
}
NEEDS = {"unlabelled": "unlabelled", "two teachers": "also"}
HEADER = ("ingredient", "requested", "score", "gain", "speed-up", "minutes")


def main() -> None:
    """Trains what is missing, and prints the table."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--speedup", default="4,10,20")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--longer", type=int, default=3, help="times the epochs in the variant of this name")
    parser.add_argument("--unlabelled", default="", help="more text, for the variant of this name")
    parser.add_argument("--also", default="", help="checkpoints of further teachers, as a list in JSON")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS], default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", default="runs/ingredients")
    options = parser.parse_options()
    output = Path(options.output)
    check_settings(output, options, free=("seeds", "variants", *NEEDS.values()))
    runs = Ingredients(options, output)
    reports = {name: [runs.run(name, seed) for seed in options.seeds] for name in runs.variants}
    console = Console()
    title = f"{options.data}, {options.epochs} epochs, seeds {', '.join(map(str, options.seeds))}"
    console.table(title, HEADER, build_rows(reports))
    console.say(describe_setup())


class Ingredients:
    """The runs of all variants.

    Args:
        options: The command line.
        output: Folder of the runs.
    """

    def __init__(self, options: argparse.Namespace, output: Path):
        self.options, self.output = options, output
        missing = [name for name, need in NEEDS.items() if not getattr(options, need)]
        self.variants = list(dict.fromkeys([PLAIN, *(name for name in options.variants if name not in missing)]))
        arguments = ["--teacher", options.teacher, *self.describe_plain()]
        seeds = [seed for seed in options.seeds if not all(self.name_report(v, seed).exists() for v in self.variants)]
        check_shared_teacher(arguments, seeds, output)
        self.teacher = fine_tune(arguments, output / "teacher")

    def run(self, variant: str, seed: int) -> Report:
        """Returns the report of a variant, which is run if it isn't finished."""
        file = self.name_report(variant, seed)
        if not file.exists():
            folder = self.output / f"seed-{seed}"
            run_command("distill", *self.build_arguments(variant, seed), "--seed", str(seed), "--output", str(folder))
            file.parent.mkdir(exist_ok=True)
            shutil.copy2(folder / "report.json", file)
        report: Report = json.loads(file.read_text())
        return report

    def name_report(self, variant: str, seed: int) -> Path:
        """Returns the file in which the report of a variant is kept."""
        return self.output / "reports" / f"{self.name_variant(variant)}-{seed}.json"

    def name_variant(self, variant: str) -> str:
        """Returns the name of a variant's files: that of a variant with texts or teachers of its own says which."""
        name = variant.replace(" ", "-")
        if variant not in NEEDS:
            return name
        return f"{name}-{sha256(getattr(self.options, NEEDS[variant]).encode()).hexdigest()[:8]}"

    def build_arguments(self, variant: str, seed: int) -> list[str]:
        """Returns the arguments of a variant but seed and output."""
        options, teacher = self.options, str(self.teacher)
        values = {"longer": options.longer * options.epochs, "unlabelled": options.unlabelled, "also": options.also}
        arguments = self.describe_plain() + [each.format(**values) for each in VARIANTS[variant].split()]
        if variant == "two steps":
            student = ["--student", self.find_slowest_entry(seed)["path"]]
            return ["--teacher", teacher, *arguments, *student, "--speedup", format_speeds(self.list_faster(seed))]
        if variant == ASSISTANT:
            speeds = self.list_remaining(seed)
            student = ["--student", teacher, "--speedup", format_speeds(speeds)]
            return ["--teacher", self.find_slowest_entry(seed)["path"], *arguments, *student]
        return ["--teacher", teacher, *arguments]

    def describe_plain(self) -> list[str]:
        """Returns the arguments of a plain student but teacher, seed and output."""
        options = self.options
        arguments = ["--student", "teacher", "--data", options.data, "--epochs", str(options.epochs)]
        return [*arguments, "--speedup", options.speedup, *options.more]

    def find_slowest_entry(self, seed: int) -> ModelEntry:
        """Returns the entry of plain's slowest student on PyTorch, whose path is its checkpoint."""
        report = self.run(PLAIN, seed)
        name = find_slowest(report)
        return next(each for each in report["models"] if (each["name"], each["runtime"]) == (name, "pytorch"))

    def list_faster(self, seed: int) -> list[float]:
        """Returns the requested speed-ups above that of plain's slowest student.

        Raises:
            SystemExit: There are none.
        """
        speeds = [read_requested_speed(entry) for entry in rank_students(self.run(PLAIN, seed))[1:]]
        if not speeds:
            raise SystemExit(
                "--speedup: expected several for two steps and assistant, found one: the slowest is a step"
            )
        return speeds

    def list_remaining(self, seed: int) -> list[float]:
        """Returns the speed-ups that are left for students of plain's slowest student, without those that it reaches.

        Raises:
            SystemExit: It reaches all of them.
        """
        gain = find_gain(self.run(PLAIN, seed))
        speeds = [speed / gain for speed in self.list_faster(seed) if speed > gain]
        if not speeds:
            raise SystemExit(
                f"--speedup: expected some above {gain:.2f} for assistant, found none: plain's slowest "
                "student is that fast"
            )
        return speeds


def find_slowest(report: Report) -> str:
    """Returns the name of the slowest student with a requested speed."""
    return rank_students(report)[0]["name"]


def find_gain(plain: Report) -> float:
    """Returns the speed-up of plain's slowest student in fp32, to which those of an assistant's are relative.

    Raises:
        SystemExit: It wasn't measured.
    """
    name = find_slowest(plain)
    gained = read_speedup(require_entry(plain, name))
    if gained is None:
        raise SystemExit(f"{name}: expected its speed-up in fp32 in the report, found none")
    return gained


def format_speeds(speeds: Sequence[float]) -> str:
    """Returns speed-ups as the value of a flag."""
    return ",".join(f"{speed:.4g}" for speed in speeds)


def read_requested_speed(entry: ModelEntry) -> float:
    """Returns the requested speed-up of a student."""
    return entry["target"]["target"]["speedup"]


def build_rows(variants: Mapping[str, Sequence[Report]]) -> list[tuple[str, ...]]:
    """Returns a line for each variant and requested speed."""
    plain = [{rank: entry["score"] for rank, entry in enumerate(rank_students(report))} for report in variants[PLAIN]]
    rows = []
    for variant, reports in variants.items():
        students = [rank_students(report) for report in reports]
        teacher_speeds = [find_gain(report) if variant == ASSISTANT else 1.0 for report in variants[PLAIN]]
        count = min(map(len, students))
        missing = len(plain[0]) - count  # an assistant's students lack the slowest speeds, of one seed perhaps more
        for rank in range(count):
            entries = [each[rank - count] for each in students]
            gains = [
                100 * (e["score"] - plain_scores[rank + missing])
                for e, plain_scores in zip(entries, plain, strict=True)
            ]
            requested = read_requested_speed(rank_students(variants[PLAIN][0])[rank + missing])
            minutes = mean(sum_minutes(report, entry) for report, entry in zip(reports, entries, strict=True))
            scores = format_percent([entry["score"] for entry in entries])
            over_teacher = zip(teacher_speeds, entries, strict=True)
            speed = format_spread([faster * (read_speedup(entry) or 0.0) for faster, entry in over_teacher], ".1f")
            gain = "" if variant == PLAIN else format_gain(gains)
            rows.append((variant, f"{requested:g}", scores, gain, speed, f"{minutes:.0f}"))
    return rows


def rank_students(report: Report) -> list[ModelEntry]:
    """Returns the students with a requested speed, the slowest first."""
    return sorted((entry for entry in report["models"] if "target" in entry), key=read_requested_speed)


def sum_minutes(report: Report, entry: ModelEntry) -> float:
    """Returns the minutes of the stages of one student, such as `shape-10x` and `distill-10x`."""
    suffix = entry["target"]["target"]["name"]
    stages = [each for each in report["stages"] if each["name"].endswith(f"-{suffix}") or f"-{suffix}-" in each["name"]]
    return sum(each["wall_seconds"] for each in stages) / 60


if __name__ == "__main__":
    main()
