"""The report stage, and `python -m pipelines.report` for a run or any checkpoint: numbers, curves, the model card."""

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.data.config import DataConfig
from distill.errors import InputError
from pipelines import cli
from pipelines.baseline import read_baseline
from pipelines.config import MeasureConfig, TaskName
from pipelines.console import Console
from pipelines.evaluate import EvaluateConfig, check_places
from pipelines.export import HUGGINGFACE
from pipelines.machine import commit, describe
from pipelines.output import check_still_there
from pipelines.publication import check_publishable, link_tree, republished
from pipelines.render import Charts, render_cards, render_html, render_page, score_rows, summary_rows
from pipelines.road import code_of, road_of
from pipelines.stage import LOGS, Artefact, Run, sha256, write_json

if TYPE_CHECKING:
    from distill.tasks.task import Task

VERSION = 1  # of this stage's algorithm; raise it when the same inputs give another result (docs/stages.md)
REPORT, PAGE, CARD, STUDENT = "report.json", "report.html", "README.md", "student"


@dataclass(frozen=True)
class ReportConfig:
    """Settings of `python -m pipelines.report`.

    Args:
        run: Folder of a finished run, whose page and card are drawn again; nothing is measured.
        charts: With --run: also write each chart as an SVG file into `charts/` of the run's folder.
        model: Or a checkpoint to evaluate and report on.
        output: Folder to write to (with --model).
        teacher: A checkpoint to compare the model with.
        data: The data set; its test split is scored.
        measure: How speed is measured.
        seed: Seed of the texts that are timed.
        task: What the model is for; auto goes by its head, else by the data's columns.
    """

    run: str | None = None
    charts: bool = False
    model: str = ""
    output: str = ""
    teacher: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    seed: int = 0
    task: TaskName = "auto"

    def __post_init__(self) -> None:
        others = [name for name in ("model", "output", "teacher") if getattr(self, name)]
        others += ["data"] * bool(self.data.path)
        if self.run is not None and others:
            raise InputError(
                f"--run: expected no --{others[0]} beside it, found one: a finished run is drawn again from its own "
                "numbers, and nothing is measured"
            )
        if self.charts and self.run is None:
            raise InputError("--charts: expected --run beside it, found none: only a finished run's charts are drawn")


def report_stage(run: Run, config: Mapping[str, Any], task: "Task", evaluation: Artefact) -> Artefact:
    """Writes report.json, report.html and the students' model cards of everything the run did."""
    stages = list(run.done)

    def work(folder: Path) -> dict[str, Any]:
        report = build_report(run, config, task, evaluation, stages)
        curves = {stage.name: read_curves(stage.folder / LOGS) for stage in stages}
        write_json(folder / REPORT, report)
        (folder / "curves.json").write_text(json.dumps({k: v for k, v in curves.items() if v}))
        (folder / PAGE).write_text(render_html(report, {k: v for k, v in curves.items() if v}))
        for name, card in render_cards(report | {"models": published(run, report["models"])}).items():
            (folder / name).write_text(card)
        return {}

    return run.stage("report", {"config": config}, {stage.name: stage for stage in stages}, work, version=VERSION)


def build_report(
    run: Run, config: Mapping[str, Any], task: "Task", evaluation: Artefact, stages: Sequence[Artefact]
) -> dict[str, Any]:
    """The report as one dict; its layout is described in the README."""
    data = next(stage for stage in stages if stage.name == "data")
    models = json.loads((evaluation.folder / "evaluation.json").read_text())
    codes, road = [code_of(Path(entry["path"])) for entry in models], road_of(stages)
    report = {
        "task": task.name,
        "metric": next(iter(models[0]["scores"])),
        "seed": run.seed,
        "license": None,
        "data": {"path": config.get("data", {}).get("path"), "classes": len(task.labels)} | dict(data.metrics),
        **read_baseline(evaluation.folder),
        "models": [entry | ({"code": code} if code else {}) for entry, code in zip(models, codes, strict=True)],
        "stages": [stage_row(stage) for stage in stages],
        "config": config,
        "machine": describe(),
        "versions": evaluation.manifest["versions"],
        "commit": commit(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    refused = [each | {"stage": stage.name} for stage in stages for each in stage.metrics.get("refused", [])]
    return report | ({"road": road} if road else {}) | ({"refused": refused} if refused else {})


def published(run: Run, models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries with the student's path where `publish` puts it: the card travels with that folder."""

    def placed(entry: Mapping[str, Any]) -> dict[str, Any]:
        if entry["name"] == "teacher":
            return dict(entry)
        folder = run.output / (STUDENT if entry["name"] == "model" else entry["name"])
        target = Path(entry["path"]).name
        return dict(entry) | {"path": str(folder if target == str(HUGGINGFACE) else folder / target)}

    return [placed(entry) for entry in models]


def stage_row(stage: Artefact) -> dict[str, Any]:
    keys = ("wall_seconds", "peak_memory_bytes", "resumed", "metrics")
    said = {"name": stage.name, "folder": str(stage.folder), "skipped": stage.skipped}
    return said | {key: stage.manifest[key] for key in keys}


def read_curves(logs: Path) -> list[dict[str, float]]:
    """Rows of every attempt; what a resumed attempt did again replaces the rows of the one that was killed."""
    rows: list[dict[str, float]] = []
    for file in sorted(logs.glob("attempt-*/metrics.csv"), key=lambda f: int(f.parent.name.split("-")[1])):
        with file.open() as lines:
            fresh = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
        if fresh:
            first = min(row["step"] for row in fresh)
            rows = [row for row in rows if row["step"] < first] + fresh
    return rows


def publish(run: Run, report: Artefact, exports: Mapping[str, Artefact]) -> dict[str, Path]:
    """Puts the newest result where a person looks for it: the page, the numbers and the students, ready to deploy.

    `exports` has a model's name for each export; its folder has that name. Files of a person's own in it stay.
    """
    check_still_there(run.output)
    for name in (REPORT, PAGE):
        partial = run.output / f".{name}.partial"
        shutil.copyfile(report.folder / name, partial)
        partial.replace(run.output / name)
    places = {"report": run.output / PAGE, "numbers": run.output / REPORT}
    for name, export in exports.items():
        places |= publish_model(run, run.output / name, report, export)
    return places


def publish_model(run: Run, place: Path, report: Artefact, export: Artefact) -> dict[str, Path]:
    """A folder with the checkpoint and its card, and one for each other format inside."""
    others = [proof["target"] for proof in export.metrics["parity"] if proof["target"] != str(HUGGINGFACE)]
    with republished(place, run.console.say) as fresh:
        link_tree(export.folder / str(HUGGINGFACE), fresh)
        for target in others:
            link_tree(export.folder / target, fresh / target)
        own = report.folder / f"{place.name}.md"  # of a family each has its own
        shutil.copyfile(own if own.is_file() else report.folder / CARD, fresh / CARD)
    return {place.name: place} | {f"{place.name}/{target}": place / target for target in others}


def show(console: Console, report: dict[str, Any], places: Mapping[str, Path]) -> None:
    """The tables at the end, and where the files are."""
    console.table("Result", *summary_rows(report))
    if scores := score_rows(report):
        console.table("Scores", *scores)
    for name, path in places.items():
        console.say(f"{name:>8}: {path}")


EXAMPLES = """\
  python -m pipelines.report --run runs/demo
  python -m pipelines.report --run runs/family --charts true
  python -m pipelines.report --model STUDENT --teacher TEACHER --data DATA --output runs/compared"""


def main(argv: Sequence[str]) -> None:
    config = cli.parse(
        ReportConfig,
        argv,
        prog="pipelines.report",
        about="Draw the report of a finished run again, or measure any checkpoint and report on it.",
        examples=EXAMPLES,
        short={"data": "data.path"},
    )
    console = Console()
    if config.run is not None:
        redraw(Path(config.run), console, charts=config.charts)
    else:
        measured(config, console)


def redraw(output: Path, console: Console, *, charts: bool = False) -> None:
    """Draws the page of a finished run from its numbers, and its charts as files where that is asked for.

    Raises:
        InputError: No finished report there, or one that was changed.
    """
    folder = reported_last(output)
    report, curves = read_json(folder / REPORT), read_json(folder / "curves.json")
    drawn = Charts.of(report, curves)
    partial = output / f".{PAGE}.partial"
    partial.write_text(render_page(report, drawn))
    partial.replace(output / PAGE)
    places = {"report": output / PAGE}
    if charts:
        places["charts"] = output / "charts"
        check_publishable(places["charts"])
        places["charts"].mkdir(exist_ok=True)
        for name, svg in drawn.files().items():
            (places["charts"] / name).write_text(svg)
    show(console, report, places)


def reported_last(output: Path) -> Path:
    """Folder of the report stage whose numbers the last run put into the output folder: an output holds a report for
    each of the settings that it was run with.
    """
    place = output / REPORT
    if not place.is_file():
        raise InputError(
            f"run {str(output)!r}: no finished report there; run pipelines.distill with this --output first"
        )
    wanted = sha256(place)
    stages = sorted((output / "report").iterdir()) if (output / "report").is_dir() else []
    found = [folder for folder in stages if (folder / REPORT).is_file() and sha256(folder / REPORT) == wanted]
    if not found:
        raise InputError(
            f"run {str(output)!r}: its {REPORT} isn't what a run wrote there: it was changed, or its stage is gone: "
            "run the same command again, which writes it anew"
        )
    return found[-1]


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{str(file)!r}: expected what the report stage wrote, found another content ({error}): remove its folder "
            "and run the same command again"
        ) from error


def measured(config: ReportConfig, console: Console) -> None:
    """Evaluates a checkpoint and reports on it."""
    settings = EvaluateConfig(
        config.model, config.output, config.teacher, config.data, config.measure, config.seed, config.task
    )
    check_places(settings)
    check_publishable(Path(config.output) / STUDENT)

    from pipelines.alone import standalone
    from pipelines.data import read_task

    run, candidates, data, evaluation = standalone(settings, console)
    report = report_stage(run, asdict(settings), read_task(data), evaluation)
    places = publish(run, report, {STUDENT: candidates[-1].export})
    show(console, json.loads((report.folder / REPORT).read_text()), places)


if __name__ == "__main__":
    cli.run(main)
