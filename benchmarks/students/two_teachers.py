"""A student trained on each of two teachers and on both: do two teachers train a better student than the better one?

    python -m benchmarks.students.two_teachers --data examples/data/banking77 --output runs/two-teachers

Two teachers are fine-tuned on a classification data set with different seeds. For each student seed,
`pipelines.distill` trains the same student on the first teacher, on the second, and on both as one checkpoint. Printed
are test accuracies: of each teacher, of the students (mean and standard deviation over the seeds), of both teachers
mixed, and the difference between the students of both teachers and those of the better teacher, which are the baseline.
The mixed teachers' own gain bounds what a student can gain. The data needs a test split of its own, since each seed
would hold out other rows. Finished runs are skipped when the same command runs again, also with more seeds; other
arguments are passed on to `pipelines.distill`, except for settings of the data.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForSequenceClassification

from benchmarks.common.command import PassThroughParser, run_command
from benchmarks.common.data_checks import check_test_split, reject_data_settings
from benchmarks.common.results_folder import check_settings, find_only_checkpoint
from benchmarks.common.spread import format_accuracy
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.config import DataConfig
from distill.data.splits.labelled import load_splits
from distill.tasks.text_classification import TextClassification
from distill.teacher.ensemble import register_ensemble
from pipelines.runs.console import Console
from pipelines.stages.prepare.scoring import compute_outputs

MAX_LENGTH = 128
CHOICES = ("first", "second", "both")


def main() -> None:
    """Trains teachers and students, scores them and prints the table."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--teachers", nargs=2, type=int, default=[100, 101], help="seeds of the teachers")
    parser.add_argument("--mix", choices=["weighted", "confidence"], default="weighted")
    parser.add_argument("--output", default="runs/two-teachers")
    options = parser.parse_options()
    console = Console()
    register_ensemble()  # so that the mixture of both loads like any checkpoint
    check_scored_data(options)
    check_settings(Path(options.output), options, free=("seeds",))
    teachers = [train_teacher(options, seed) for seed in options.teachers]
    scores = {f"teacher {i + 1}": [measure_accuracy(options, each)] for i, each in enumerate(teachers)}
    for choice in CHOICES:
        students = [train_student(options, choice, teachers, seed) for seed in options.seeds]
        scores[choice] = [measure_accuracy(options, student) for student in students]
        console.say(f"{choice}: {format_accuracy(scores[choice])}")
    mixed = find_only_checkpoint(Path(options.output) / f"both-{options.seeds[0]}", "ensemble")
    scores["both teachers, mixed"] = [measure_accuracy(options, mixed)]
    rows = [
        (name, format_accuracy(values), ", ".join(f"{value:.2%}" for value in values))
        for name, values in scores.items()
    ]
    console.table(f"{Path(options.data).name}, test accuracy", ("teacher", "mean", "each seed"), rows)
    better = max(CHOICES[:2], key=lambda choice: statistics.mean(scores[choice]))
    gains = [both - one for both, one in zip(scores["both"], scores[better], strict=True)]
    differences = ", ".join(f"{gain * 100:+.2f}" for gain in gains)
    console.say(f"both teachers compared with the {better}, per seed: {differences} points")


def check_scored_data(options: argparse.Namespace) -> None:
    """Checks that `measure_accuracy` scores rows that no run trains on, read as the runs read them.

    Raises:
        SystemExit: The data has no test split of its own, or a setting of the data is passed on.
    """
    reject_data_settings(options.more, "accuracies are measured on the test split of --data, read as by default")
    check_test_split(load_splits(DataConfig(path=options.data)), options.data)


def run_distill(options: argparse.Namespace, output: Path, *arguments: str) -> None:
    """Runs `pipelines.distill` with the recipe and the data of the benchmark."""
    run_command("distill", "--config", options.config, "--data", options.data, "--output", str(output), *arguments)


def train_teacher(options: argparse.Namespace, seed: int) -> Path:
    """Returns the checkpoint of a teacher that was fine-tuned with this seed."""
    output = Path(options.output) / f"teacher-{seed}"
    run_distill(options, output, "--seed", str(seed), "--until", "teacher", *options.more)
    return find_only_checkpoint(output, "teacher")


def train_student(options: argparse.Namespace, choice: str, teachers: Sequence[Path], seed: int) -> Path:
    """Returns the checkpoint of a student of the first teacher, the second or both."""
    output = Path(options.output) / f"{choice}-{seed}"
    first = teachers[choice == "second"]
    arguments = ["--teacher", str(first), "--seed", str(seed), "--until", "distill", *options.more]
    if choice == "both":
        arguments += ["--teacher.additional", json.dumps([str(teachers[1])]), "--teacher.mix", options.mix]
    run_distill(options, output, *arguments)
    return find_only_checkpoint(output, "distill")


def measure_accuracy(options: argparse.Namespace, folder: Path) -> float:
    """Returns the accuracy of a checkpoint on the test split."""
    splits, tokenizer = load_splits(DataConfig(path=options.data)), load_tokenizer(folder)
    task = TextClassification(splits.labels)
    test = task.encode(tokenizer, splits.test, MAX_LENGTH)
    model = AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True)
    return compute_outputs(model, test, int(tokenizer.pad_token_id or 0), task).score


if __name__ == "__main__":
    main()
