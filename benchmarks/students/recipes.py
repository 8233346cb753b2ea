"""Students of four papers' recipes and one teacher, with general distillation on plain text before the task.

    python -m benchmarks.students.recipes --general my_prose/ --blocks 40000 --data examples/data/banking77
    python -m benchmarks.students.recipes --general my_prose/ --data a/ b/ --students mobilebert=mobilebert,layers=4

A student is a recipe of configs/recipes, or `recipe=spec` for one of other sizes. `pipelines.distill` trains each with
the recipe's settings, except for the text, its length and the sizes. Data sets share what is equal for them: the
teacher and the general distillation.

Printed per data set, a classification task: parameters, test accuracy, the share of the teacher's accuracy, the latency
in ms of a single text on ONNX Runtime (fp32, one thread; all students and their teacher alternate on the same texts),
the speedup over the teacher, and the minutes of general distillation. The first row is the teacher's own. Finished runs
are skipped when the same command runs again; other arguments are passed on to `pipelines.distill`.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.common.command import PassThroughParser, run_command
from benchmarks.common.results_folder import copy_stages, find_checkpoint, read_report, require_entry
from compress.measure.latency import Latency
from compress.prune.budget import Budget
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.config import DataConfig
from distill.data.splits.labelled import load_splits
from distill.tasks.text_classification import TextClassification
from pipelines.reports.schema import ModelEntry, Report, StageEntry
from pipelines.runs.console import Console
from pipelines.stages.deliver.exported_targets import find_budget_target
from pipelines.stages.prune.budget_timing import build_timed, draw_texts, time_together

RECIPES = ("distilbert", "tinybert", "minilm", "mobilebert")
SHARED_STAGES = ("data", "teacher", "general")  # stages that other runs may have built
HEADER = ("student", "parameters", "accuracy", "of the teacher's", "ms", "speedup", "minutes of general distillation")


@dataclass(frozen=True)
class RecipeStudent:
    """A student of a recipe, with another spec than the recipe's if `spec` is set."""

    recipe: str
    spec: str = ""

    @classmethod
    def parse(cls, text: str) -> "RecipeStudent":
        """Returns the student named by `recipe` or `recipe=spec`."""
        recipe, _, spec = text.partition("=")
        return cls(recipe, spec)

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.recipe}={self.spec}" if self.spec else self.recipe

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return self.name.replace("=", "-").replace(",", "_")

    @property
    def arguments(self) -> list[str]:
        """The arguments of `pipelines.distill` that define the student."""
        config = ["--config", f"configs/recipes/{self.recipe}.yaml"]
        return [*config, "--student", self.spec] if self.spec else config


def main() -> None:
    """Trains the students that are missing, and prints a table for each data set."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--general", required=True, help="plain text: a folder or a file")
    parser.add_argument("--blocks", type=int, default=40_000, help="blocks of 128 tokens of plain text")
    parser.add_argument("--data", nargs="+", default=["examples/data/banking77"])
    students = [RecipeStudent(name) for name in RECIPES]
    parser.add_argument("--students", nargs="+", type=RecipeStudent.parse, default=students)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/recipes")
    parser.add_argument("--rounds", type=int, default=60, help="calls of each text when all are timed together")
    options = parser.parse_options()
    finished: list[Path] = []
    for data in options.data:
        for student in options.students:
            output = output_folder(options, data, student)
            copy_stages(finished, output, SHARED_STAGES)
            train_student(options, student, data, output)
            finished.append(output)
    for data in options.data:
        print_table(Console(), options, data)


def output_folder(options: argparse.Namespace, data: str, student: RecipeStudent) -> Path:
    """Returns the folder of a student's run on a data set."""
    return Path(options.output) / Path(data).name / student.folder


def train_student(options: argparse.Namespace, student: RecipeStudent, data: str, output: Path) -> None:
    """Runs `pipelines.distill` for a student on a data set."""
    arguments = [
        *student.arguments,
        "--data",
        data,
        "--general.data",
        options.general,
        "--general.blocks",
        str(options.blocks),
    ]
    run_command("distill", *arguments, "--seed", str(options.seed), *options.more, "--output", str(output))


def print_table(console: Console, options: argparse.Namespace, data: str) -> None:
    """Prints the table of one data set, the fastest student first."""
    folders = {student.name: output_folder(options, data, student) for student in options.students}
    reports = {name: read_report(folder) for name, folder in folders.items()}
    latencies = measure_latencies(options, data, folders)
    teacher = require_entry(next(iter(reports.values())), "teacher")
    rows = [("teacher", *format_entry(teacher), "", f"{latencies['teacher'].best_ms:.2f}", "1.00x", "")]
    for name in sorted(folders, key=lambda name: latencies[name].best_ms):
        entry, latency = require_entry(reports[name], "student"), latencies[name].best_ms
        share, speedup = entry["score"] / teacher["score"], latencies["teacher"].best_ms / latency
        figures = (f"{share:.1%}", f"{latency:.2f}", f"{speedup:.2f}x", format_general_minutes(reports[name]))
        rows.append((name, *format_entry(entry), *figures))
    console.table(f"{Path(data).name}: fp32, ONNX Runtime, one thread, one text per call", HEADER, rows)


def format_entry(entry: ModelEntry) -> tuple[str, str]:
    """Returns the cells of the parameters and of the accuracy."""
    return f"{entry['params'] / 1e6:.1f}M", f"{entry['score']:.2%}"


def format_general_minutes(report: Report) -> str:
    """Returns the minutes of general distillation; empty if a part of them is unknown because the run was killed."""
    general: StageEntry | None = next((stage for stage in report["stages"] if stage["name"] == "general"), None)
    return f"{general['wall_seconds'] / 60:.0f}" if general and not general["resumed"] else ""


def measure_latencies(options: argparse.Namespace, data: str, folders: Mapping[str, Path]) -> dict[str, Latency]:
    """Returns the latencies of all students and their teacher, which alternate on the same texts."""
    torch.set_num_threads(1)
    budget = Budget(runtime="onnxruntime", precision="fp32").resolve()
    splits = load_splits(DataConfig(path=data, validation_fraction=0.05), options.seed)
    texts = draw_texts(splits.test, budget, 128, options.seed, TextClassification(splits.labels))
    checkpoints = {"teacher": find_checkpoint(next(iter(folders.values())), "teacher")}
    checkpoints |= {name: find_checkpoint(folder, "distill") for name, folder in folders.items()}
    with tempfile.TemporaryDirectory() as scratch:
        built = {}
        for i, (name, checkpoint) in enumerate(checkpoints.items()):
            folder = Path(scratch) / str(i)
            folder.mkdir()
            model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
            built[name] = build_timed(model, tokenizer, find_budget_target(budget), folder, texts)
        return time_together(built, budget, budget.lengths[0], options.rounds, Console(), "timing")


def load_model(folder: Path) -> PreTrainedModel:
    """Returns the classifier of a checkpoint in eval mode."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True)
    model.eval()
    return model


if __name__ == "__main__":
    main()
