"""The report stage: a run's results as JSON, HTML and model cards, and the folders that the run publishes."""

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipelines.reports.pruning_summary import find_code, read_pruning
from pipelines.reports.pruning_table import build_speed_table
from pipelines.reports.recommendation import build_recommendations
from pipelines.reports.render import render_cards, render_html
from pipelines.reports.schema import EVALUATION, ModelEntry, Report, StageEntry
from pipelines.reports.tables import build_scores, build_summary
from pipelines.reports.targets import write_verdicts
from pipelines.reports.training_notes import write_training_notes
from pipelines.runs.console import Console
from pipelines.runs.files import write_json
from pipelines.runs.manifest import LOGS
from pipelines.runs.output import check_not_removed
from pipelines.runs.publication import link_tree, republish_folder
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.this_machine import describe_machine, find_commit
from pipelines.stages.deliver.baseline import read_baseline
from pipelines.stages.deliver.export import HUGGINGFACE
from pipelines.stages.deliver.training_events import read_training_events

if TYPE_CHECKING:
    from distill.tasks.task import Task

VERSION = 8  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


REPORT, PAGE, CARD, STUDENT = "report.json", "report.html", "README.md", "student"


def report_stage(run: Run, config: Mapping[str, Any], task: "Task", evaluation: Artefact) -> Artefact:
    """Writes report.json, report.html and the students' model cards, which cover all stages of the run."""
    stages = list(run.done)

    def work(folder: Path) -> dict[str, Any]:
        report = build_report(run, config, task, evaluation, stages)
        curves = {stage.name: rows for stage in stages if (rows := read_curves(stage.folder / LOGS))}
        write_json(folder / REPORT, report)
        (folder / "curves.json").write_text(json.dumps(curves))
        (folder / PAGE).write_text(render_html(report, curves), "utf-8")
        published_report = cast(Report, {**report, "models": list_published_models(run, report["models"])})
        for name, card in render_cards(published_report).items():
            (folder / name).write_text(card, "utf-8")
        return {}

    return run.stage("report", {"config": config}, {stage.name: stage for stage in stages}, work, version=VERSION)


def build_report(
    run: Run, config: Mapping[str, Any], task: "Task", evaluation: Artefact, stages: Sequence[Artefact]
) -> Report:
    """Returns the report as one dict; see `pipelines.reports.schema`."""
    named = {stage.name: stage for stage in stages}
    data = next(named[each] for each in ("answers", "select", "augment", "clean", "data") if each in named)
    models = json.loads((evaluation.folder / EVALUATION).read_text())
    codes, pruning = [find_code(Path(entry["path"])) for entry in models], read_pruning(stages)
    report = {
        "task": task.name,
        "metric": next(iter(models[0]["scores"])),
        "seed": run.seed,
        "license": None,
        "data": {
            "path": config.get("data", {}).get("path"),
            "classes": len(task.labels),
            "truncated": count_truncated(stages),
        }
        | dict(data.metrics),
        **read_baseline(evaluation.folder),
        "models": [entry | ({"code": code} if code else {}) for entry, code in zip(models, codes, strict=True)],
        "stages": [stage_row(stage) for stage in stages],
        "config": config,
        "machine": describe_machine(),
        "versions": evaluation.manifest["versions"],
        "commit": find_commit(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    rejected = [each | {"stage": stage.name} for stage in stages for each in stage.metrics.get("rejected", [])]
    trainings = {stage.name: read_training_events(stage.folder / LOGS) for stage in stages}
    optional = {
        "pruning": pruning if pruning and pruning["students"] else None,  # a frontier may have no pruned student
        "rejected": rejected,
        "trainings": {name: each for name, each in trainings.items() if each is not None},
    }
    return cast(Report, report | {name: value for name, value in optional.items() if value})


def count_truncated(stages: Sequence[Artefact]) -> int:
    """Returns how many texts that a student was trained and validated on were truncated."""
    notes = [stage.metrics.get("notes", {}) for stage in stages if stage.name.startswith("distill")]
    return max((sum(part.get("cut", 0) for part in each.values()) for each in notes), default=0)


def list_published_models(run: Run, models: Sequence[ModelEntry]) -> list[ModelEntry]:
    """Returns the entries with the students' paths as published, because the model card is copied with that folder."""

    def placed(entry: ModelEntry) -> ModelEntry:
        if entry["name"] == "teacher":
            return entry
        folder = run.output / (STUDENT if entry["name"] == "model" else entry["name"])
        target = Path(entry["path"]).name
        return {**entry, "path": str(folder if target == str(HUGGINGFACE) else folder / target)}

    return [placed(entry) for entry in models]


def stage_row(stage: Artefact) -> StageEntry:
    """Returns what the report lists of a stage."""
    return {
        "name": stage.name,
        "folder": str(stage.folder),
        "skipped": stage.skipped,
        "wall_seconds": stage.manifest["wall_seconds"],
        "peak_memory_bytes": stage.manifest["peak_memory_bytes"],
        "resumed": stage.manifest["resumed"],
        "metrics": stage.manifest["metrics"],
    }


def read_curves(logs: Path) -> list[dict[str, float]]:
    """Returns the rows of all attempts' logs; steps repeated by a resumed attempt replace those of the killed one."""
    rows: list[dict[str, float]] = []
    for file in sorted(logs.glob("attempt-*/metrics.csv"), key=lambda f: int(f.parent.name.split("-")[1])):
        with file.open() as lines:
            fresh = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
        if fresh:
            first = min(row["step"] for row in fresh)
            rows = [row for row in rows if row["step"] < first] + fresh
    return rows


def publish_results(
    run: Run, report: Artefact, exports: Mapping[str, Artefact], preprocessing: Path | None = None
) -> dict[str, Path]:
    """Publishes the newest results to the output folder: the page, the numbers and the deployable students.

    `exports` maps a model's name, which is also the name of its folder, to its export; `preprocessing` is a file that
    says how its texts are cleaned, of which every folder gets a copy, and its tokenizer those steps that it can apply.
    The user's own files in that folder are left in place.
    """
    check_not_removed(run.output)
    for name in (REPORT, PAGE):
        partial = run.output / f".{name}.partial"
        shutil.copyfile(report.folder / name, partial)
        partial.replace(run.output / name)
    places = {"report": run.output / PAGE, "numbers": run.output / REPORT}
    for name, export in exports.items():
        places |= publish_model(run, run.output / name, report, export, preprocessing)
    return places


def publish_model(
    run: Run, destination: Path, report: Artefact, export: Artefact, preprocessing: Path | None = None
) -> dict[str, Path]:
    """Publishes a folder with the checkpoint and its model card, and a subfolder for each other format."""
    others = [proof["target"] for proof in export.metrics["parity"] if proof["target"] != str(HUGGINGFACE)]
    with republish_folder(destination, run.console.say) as fresh:
        link_tree(export.folder / str(HUGGINGFACE), fresh)
        for target in others:
            link_tree(export.folder / target, fresh / target)
        for folder in (fresh, *(fresh / target for target in others)):
            add_preprocessing(folder, preprocessing)
        card = report.folder / f"{destination.name}.md"  # with several students each has its own card
        shutil.copyfile(card if card.is_file() else report.folder / CARD, fresh / CARD)
    return {destination.name: destination} | {f"{destination.name}/{target}": destination / target for target in others}


def add_preprocessing(folder: Path, preprocessing: Path | None) -> None:
    """Adds the file that says how texts are cleaned to a folder, and to its tokenizer the steps that it can apply."""
    from distill.data.clean.deployment import read_deployed_steps
    from distill.data.clean.tokenizer_normalizer import add_normalizers

    if preprocessing is not None:
        shutil.copyfile(preprocessing, folder / preprocessing.name)
        add_normalizers(folder, read_deployed_steps(folder))


def print_results(console: Console, report: Report, places: Mapping[str, Path]) -> None:
    """Prints the result tables and the paths of the published files."""
    console.table("Result", *build_summary(report))
    if speeds := build_speed_table(report):
        console.table("Requested speed", *speeds)
        for verdict in write_verdicts(report):
            console.say(f"  {verdict.sentence}")
    if recommended := build_recommendations(report):
        console.table("Which student to take", *recommended)
    if scores := build_scores(report):
        console.table("Scores", *scores)
    for name, training in report.get("trainings", {}).items():
        for note in write_training_notes(training):
            console.say(f"{name:>8}: {note}")
    for name, path in places.items():
        console.say(f"{name:>8}: {path}")
