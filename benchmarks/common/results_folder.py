"""The folder in which a benchmark keeps its results: the settings that made them, and the checkpoints of its runs."""

import argparse
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipelines.reports.schema import ModelEntry, Report

SETTINGS, RESULTS = "settings.json", "results.jsonl"

Result = TypeVar("Result", bound=Mapping[str, Any])


class Results(Generic[Result]):
    """The results of a benchmark's finished trainings, a line of `results.jsonl` each.

    Args:
        output: Folder of the file.
    """

    def __init__(self, output: Path):
        self.file = output / RESULTS
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.all: list[Result] = [json.loads(line) for line in lines]

    def find(self, **key: object) -> Result | None:
        """Returns the result with these values; None if its training hasn't finished."""
        return next((each for each in self.all if all(each[name] == value for name, value in key.items())), None)

    def add(self, result: Result) -> Result:
        """Stores and prints a result, and returns it."""
        self.all.append(result)
        with self.file.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        return result


def check_settings(output: Path, options: argparse.Namespace, *, free: Collection[str]) -> None:
    """Checks that the results in a folder were made with the same settings; those named in `free` may change.

    Raises:
        SystemExit: An earlier call with other settings left results in the folder.
    """
    settings = {name: value for name, value in vars(options).items() if name not in {"output", *free}}
    output.mkdir(parents=True, exist_ok=True)
    file = output / SETTINGS
    # The settings of a call that left no results, as after a misspelt path, don't matter.
    has_results = file.exists() and any(path != file for path in output.iterdir())
    before = json.loads(file.read_text()) if has_results else settings
    if before != settings:
        names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
        changed = ", ".join(f"{name} {before.get(name)}, not {settings.get(name)}" for name in names)
        raise SystemExit(
            f"{output} was made with {changed}: its results would be mixed with this call's; choose a new folder"
        )
    if not has_results:
        file.write_text(json.dumps(settings))


def find_checkpoint(output: Path, stage: str) -> Path:
    """Returns the checkpoint of a finished run's stage, as named by its report: others may be in the same folder."""
    stages = json.loads((output / "report.json").read_text())["stages"]
    key = next(Path(each["folder"]).name for each in stages if each["name"] == stage)
    return output / stage / key / "model"


def find_only_checkpoint(output: Path, stage: str) -> Path:
    """Returns the checkpoint of the stage of a run that ended before its report.

    Raises:
        SystemExit: The stage was built more than once, or not at all.
    """
    return find_only(output, stage, "model", "checkpoint")


def find_only(output: Path, stage: str, name: str, noun: str) -> Path:
    """Returns a file or folder of a stage that was built once; `noun` describes it in the error.

    Raises:
        SystemExit: The stage was built more than once, or not at all.
    """
    matches = sorted((output / stage).glob(f"*/{name}"))
    if len(matches) != 1:
        raise SystemExit(
            f"{output / stage}: expected one {noun}, found {len(matches)}: it is unknown which belongs to this call; "
            "choose a new folder"
        )
    return matches[0]


def read_report(output: Path) -> Report:
    """Returns the report of a finished run."""
    report: Report = json.loads((output / "report.json").read_text())
    return report


def find_entry(report: Report, name: str, runtime: str = "onnxruntime", precision: str = "fp32") -> ModelEntry | None:
    """Returns a model's entry in a report; None if there is none."""
    key = (name, runtime, precision)
    return next((e for e in report["models"] if (e["name"], e["runtime"], e["precision"]) == key), None)


def require_entry(report: Report, name: str, runtime: str = "onnxruntime", precision: str = "fp32") -> ModelEntry:
    """Returns a model's entry in a report.

    Raises:
        SystemExit: The report has no such entry.
    """
    entry = find_entry(report, name, runtime, precision)
    if entry is None:
        raise SystemExit(f"report: expected an entry of {name} on {runtime} in {precision}, found none")
    return entry


def copy_stages(sources: Sequence[Path], output: Path, stages: Sequence[str]) -> None:
    """Copies finished stages of other runs, so that a run reuses them if their keys are those of its own stages."""
    for source in sources:
        for name in stages:
            for stage in (source / name).glob("*"):
                target = output / name / stage.name
                if not target.exists():
                    output.mkdir(parents=True, exist_ok=True)
                    for marker in source.glob("stillroom.json"):
                        shutil.copy2(marker, output / marker.name)
                    shutil.copytree(stage, target)
