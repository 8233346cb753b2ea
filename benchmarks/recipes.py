"""The papers' students from one teacher, with plain text before the task: accuracy, parameters, speed, and who wins.

    python -m benchmarks.recipes --general my_prose/ --blocks 40000 --data examples/data/banking77 --output runs/recipes
    python -m benchmarks.recipes --general my_prose/ --data a/ b/ --students mobilebert=mobilebert,layers=4

A student is a recipe of configs/recipes, or `recipe=spec` for one of other sizes. `pipelines.distill` makes each, with
the recipe as it is but for the text, its length and the sizes. What a data set has in common with the others (the
teacher, the phase on plain text) is made once. In the end all students of a data set and their teacher are timed
together on ONNX Runtime: fp32, one thread, one text. What is finished is skipped when the same command runs again.
Words that aren't its own go to `pipelines.distill`.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.command import command
from benchmarks.kept import checkpoint_of
from compress.measure.latency import Latency
from compress.prune.budget import Budget
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.config import DataConfig
from distill.data.splits.labelled import load_splits
from distill.tasks.text_classification import TextClassification
from pipelines.runs.console import Console
from pipelines.stages.budget_timing import build, target_for, texts_of, time_together

RECIPES = ("distilbert", "tinybert", "minilm", "mobilebert")
SHARED = ("data", "teacher", "general")  # stages that other runs may have made


@dataclass(frozen=True)
class Entry:
    """One student: its recipe, and its spec where that isn't the recipe's."""

    recipe: str
    spec: str = ""

    @property
    def name(self) -> str:
        return f"{self.recipe}={self.spec}" if self.spec else self.recipe

    @property
    def folder(self) -> str:
        return self.name.replace("=", "-").replace(",", "_")

    @property
    def words(self) -> list[str]:
        config = ["--config", f"configs/recipes/{self.recipe}.yaml"]
        return [*config, "--student", self.spec] if self.spec else config


def entry_of(text: str) -> Entry:
    recipe, _, spec = text.partition("=")
    return Entry(recipe, spec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--general", required=True, help="plain text: a folder or a file")
    parser.add_argument("--blocks", type=int, default=40_000, help="of 128 tokens")
    parser.add_argument("--data", nargs="+", default=["examples/data/banking77"])
    parser.add_argument("--students", nargs="+", type=entry_of, default=[Entry(name) for name in RECIPES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/recipes")
    parser.add_argument("--rounds", type=int, default=60, help="calls of each text when all are timed together")
    given, more = parser.parse_known_args()
    given.more = more
    console, made = Console(), list[Path]()
    for data in given.data:
        for entry in given.students:
            output = Path(given.output) / Path(data).name / entry.folder
            lend(made, output)
            run(given, entry, data, output)
            made.append(output)
    for data in given.data:
        show(console, given, data)


def run(given: argparse.Namespace, entry: Entry, data: str, output: Path) -> None:
    words = [*entry.words, "--data", data, "--general.data", given.general, "--general.blocks", str(given.blocks)]
    command("distill", *words, "--seed", str(given.seed), *given.more, "--output", str(output))


def lend(made: Sequence[Path], output: Path, stages: Sequence[str] = SHARED) -> None:
    """Copies what other runs made; a stage that isn't this one's is left aside by its key."""
    for before in made:
        for name in stages:
            for stage in (before / name).glob("*"):
                place = output / name / stage.name
                if not place.exists():
                    output.mkdir(parents=True, exist_ok=True)
                    for mark in before.glob("stillroom.json"):
                        shutil.copy2(mark, output / mark.name)
                    shutil.copytree(stage, place)


def show(console: Console, given: argparse.Namespace, data: str) -> None:
    """The table of one data set, the fastest student first."""
    folders = {entry.name: Path(given.output) / Path(data).name / entry.folder for entry in given.students}
    reports = {name: json.loads((folder / "report.json").read_text()) for name, folder in folders.items()}
    times = timed(given, data, folders)
    first = next(iter(reports.values()))
    taught = whole(first, "teacher")
    rows = [("teacher", millions(taught), percent(taught), "", f"{times['teacher'].best_ms:.2f}", "1.00x", "")]
    for name in sorted(folders, key=lambda name: times[name].best_ms):
        own = whole(reports[name], "student")
        share, speedup = own["score"] / taught["score"], times["teacher"].best_ms / times[name].best_ms
        general = stage_of(reports[name], "general")
        # of one that was killed, only the last part's time is known
        minutes = f"{general['wall_seconds'] / 60:.0f}" if general and not general["resumed"] else ""
        rows.append((name, millions(own), percent(own), f"{share:.1%}", f"{times[name].best_ms:.2f}",
                     f"{speedup:.2f}x", minutes))  # fmt: skip
    header = ("student", "parameters", "accuracy", "of the teacher's", "ms", "speed", "minutes of plain text")
    console.table(f"{Path(data).name}: fp32, ONNX Runtime, one thread, one text", header, rows)


def stage_of(report: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((stage for stage in report["stages"] if stage["name"] == name), None)


def whole(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(
        e for e in report["models"] if (e["name"], e["runtime"], e["precision"]) == (name, "onnxruntime", "fp32")
    )


def millions(entry: dict[str, Any]) -> str:
    return f"{entry['params'] / 1e6:.1f}M"


def percent(entry: dict[str, Any]) -> str:
    return f"{entry['score']:.2%}"


def timed(given: argparse.Namespace, data: str, folders: dict[str, Path]) -> dict[str, Latency]:
    """All students and their teacher in turn on the same texts."""
    torch.set_num_threads(1)
    budget = Budget(runtime="onnxruntime", precision="fp32")
    splits = load_splits(DataConfig(path=data, validation_fraction=0.05), given.seed)
    texts = texts_of(splits.test, budget, 128, given.seed, TextClassification(splits.labels))
    places = {"teacher": checkpoint_of(next(iter(folders.values())), "teacher")}
    places |= {name: checkpoint_of(folder, "distill") for name, folder in folders.items()}
    with tempfile.TemporaryDirectory() as scratch:
        built = {}
        for i, (name, place) in enumerate(places.items()):
            folder = Path(scratch) / str(i)
            folder.mkdir()
            built[name] = build(load(place), load_tokenizer(place), target_for(budget), folder, texts)
        return time_together(built, budget, given.rounds)


def load(place: Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(place, use_safetensors=True).eval()


if __name__ == "__main__":
    main()
