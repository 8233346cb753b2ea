"""`python -m pipelines.report`: draws the report of a finished run again, or reports on any checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.errors import InputError
from pipelines.reports.render import Charts, render_page
from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.manifest import hash_file
from pipelines.runs.publication import check_publishable
from pipelines.settings.commands.evaluate import EvaluateConfig, check_places
from pipelines.settings.commands.report import ReportConfig
from pipelines.stages.deliver.report import PAGE, REPORT, STUDENT, print_results, publish_results, report_stage

EXAMPLES = """\
  python -m pipelines.report --run runs/demo
  python -m pipelines.report --run runs/family --charts true
  python -m pipelines.report --model STUDENT --teacher TEACHER --data DATA --output runs/compared"""


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
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
        report_on_checkpoint(config, console)


def redraw(output: Path, console: Console, *, charts: bool = False) -> None:
    """Draws the report page of a finished run from its stored results and, if requested, its charts as files.

    Raises:
        InputError: The folder contains no finished report, or the report was changed.
    """
    folder = find_report_folder(output)
    report, curves = read_stage_json(folder / REPORT), read_stage_json(folder / "curves.json")
    drawn = Charts.of(report, curves)
    partial = output / f".{PAGE}.partial"
    partial.write_text(render_page(report, drawn), "utf-8")
    partial.replace(output / PAGE)
    paths = {"report": output / PAGE}
    if charts:
        paths["charts"] = output / "charts"
        check_publishable(paths["charts"])
        paths["charts"].mkdir(exist_ok=True)
        for name, svg in drawn.files().items():
            (paths["charts"] / name).write_text(svg, "utf-8")
    print_results(console, report, paths)


def find_report_folder(output: Path) -> Path:
    """Returns the folder of the report stage whose results the last run copied to the output folder.

    An output folder contains a report for each configuration that it was run with.

    Raises:
        InputError: The folder contains no finished report, the report was changed, or its stage is missing.
    """
    published = output / REPORT
    if not published.is_file():
        raise InputError(
            f"run {str(output)!r}: no finished report there; run pipelines.distill with this --output first"
        )
    published_hash = hash_file(published)
    stages = sorted((output / "report").iterdir()) if (output / "report").is_dir() else []
    sources = [each for each in stages if (each / REPORT).is_file() and hash_file(each / REPORT) == published_hash]
    if not sources:
        raise InputError(
            f"run {str(output)!r}: expected {REPORT} as a run wrote it, found another: it was changed, or "
            "its stage was removed: run the same command again to rewrite it"
        )
    return sources[-1]


def read_stage_json(file: Path) -> Any:
    """Returns the content of a JSON file of the report stage.

    Raises:
        InputError: The file can't be read, or isn't JSON.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{str(file)!r}: expected what the report stage wrote, found other content ({error}): remove its folder "
            "and run the same command again"
        ) from error


def report_on_checkpoint(config: ReportConfig, console: Console) -> None:
    """Evaluates a checkpoint and writes a report on it.

    Raises:
        InputError: An exported file was rejected; the report is written all the same.
    """
    settings = EvaluateConfig(
        config.model, config.output, config.teacher, config.data, config.measure, config.seed, config.task
    )
    check_places(settings)
    check_publishable(Path(config.output) / STUDENT)

    from pipelines.stages.deliver.export import check_rejected
    from pipelines.stages.deliver.standalone import evaluate_standalone
    from pipelines.stages.prepare.data import read_task

    run, candidates, data, evaluation = evaluate_standalone(settings, console)
    report = report_stage(run, asdict(settings), read_task(data), evaluation)
    paths = publish_results(run, report, {STUDENT: candidates[-1].export})
    print_results(console, json.loads((report.folder / REPORT).read_text()), paths)
    check_rejected([candidate.export for candidate in candidates])


if __name__ == "__main__":
    cli.run(main)
