"""Renders a finished report as an HTML page and model cards."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pipelines.reports.charts import (
    Chart,
    LogRow,
    assign_colors,
    draw_speed_charts,
    draw_stage_charts,
    make_standalone,
)
from pipelines.reports.formatting import (
    capitalize_first,
    format_metric,
    format_ms,
    format_percent,
    format_quantity,
    format_ratio,
    format_runtime,
    format_score,
)
from pipelines.reports.headline import (
    explain_headline_entry,
    family_names,
    find_teacher,
    headline_entry,
    student_entries,
    write_headline,
)
from pipelines.reports.notes import write_measurement_notes, write_score_notes
from pipelines.reports.pareto import draw_pareto_charts
from pipelines.reports.pruning_table import (
    StageRows,
    best_trial,
    build_pruning_table,
    describe_shape,
    write_pruning_notes,
)
from pipelines.reports.recommendation import write_recommendations
from pipelines.reports.schema import Report, ShapeTrial
from pipelines.reports.tables import build_scores, build_summary
from pipelines.reports.targets import Verdict, pruned_students, write_verdicts
from pipelines.reports.training_notes import write_training_notes
from pipelines.reports.wording import WORDING, Wording, name_validation_metric

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Charts:
    """Charts of the models' speed and size, and of each stage's training."""

    speed: Sequence[Chart]
    stages: Mapping[str, Sequence[Chart]]

    @classmethod
    def of(cls, report: Report, curves: Mapping[str, Sequence[LogRow]]) -> "Charts":
        """Draws the charts of a report; `curves` maps a stage to the rows of its training log."""
        metric = name_validation_metric(report)
        trainings = report.get("trainings", {})
        names = dict.fromkeys([*curves, *trainings])
        stages = {name: draw_stage_charts(curves.get(name, ()), metric, trainings.get(name)) for name in names}
        return cls(draw_speed_charts(report) + draw_pareto_charts(report), stages)

    def files(self) -> dict[str, str]:
        """Returns file name -> standalone SVG of each chart."""
        svgs = dict(self.speed)
        for stage, charts in self.stages.items():
            svgs |= {f"{stage} {chart.caption}": chart.svg for chart in charts}
        return {
            re.sub(r"\W+", "-", name.lower()).strip("-") + ".svg": make_standalone(svg) for name, svg in svgs.items()
        }


@dataclass(frozen=True)
class TrialList:
    """The shapes that were tried for a student, and the index of the best one."""

    name: str
    best: int
    trials: Sequence[ShapeTrial]


@dataclass(frozen=True)
class PruningSection:
    """The part of the page on pruning."""

    header: Sequence[str]
    stages: Sequence[StageRows]
    verdicts: Sequence[Verdict]
    notes: Sequence[str]
    trials: Sequence[TrialList]

    @classmethod
    def of(cls, report: Report) -> "PruningSection":
        """Returns the section of a report of a pruning run."""
        header, stages = build_pruning_table(report)
        best_trials = [(student, best_trial(student["trials"])) for student in pruned_students(report)]
        trials = [TrialList(each["name"], best, each["trials"]) for each, best in best_trials if best is not None]
        return cls(header, stages, write_verdicts(report), write_pruning_notes(report), trials)


def render_html(report: Report, curves: Mapping[str, Sequence[LogRow]]) -> str:
    """Returns the report as a self-contained page that loads no other file.

    Args:
        report: The finished report.
        curves: Stage -> rows of its training log.
    """
    return render_page(report, Charts.of(report, curves))


def render_page(report: Report, charts: Charts) -> str:
    """Returns the page with charts that are already drawn."""
    is_family, wording, entry = bool(family_names(report)), WORDING[report["task"]], headline_entry(report)
    return load_template("report.html.jinja").render(
        report=report,
        headline=write_headline(report),
        best=entry,
        best_note=explain_headline_entry(report) if is_family else None,
        teacher=find_teacher(report, entry),
        summary=build_summary(report),
        scores=build_scores(report),
        score_notes=write_score_notes(report),
        wording=wording,
        data={name: value for name, value in report["data"].items() if _is_listed(name, wording)},
        remarks=report["data"].get("remarks", []),
        measurement_notes=write_measurement_notes(report),
        charts=charts,
        training_notes={name: write_training_notes(training) for name, training in report.get("trainings", {}).items()},
        config=json.dumps(report["config"], indent=2, default=str, ensure_ascii=False),
        dots=assign_colors(each["name"] for each in report["models"]) if is_family else {},
        recommendations=write_recommendations(report),
        pruning=PruningSection.of(report) if report.get("pruning") else None,
    )


def render_cards(report: Report) -> dict[str, str]:
    """Returns file name -> Hugging Face model card: README.md of a single student, or NAME.md of each of several."""
    if not family_names(report):
        return {"README.md": render_card(report)}
    return {f"{name}.md": render_card(report, name) for name in family_names(report)}


def render_card(report: Report, name: str | None = None) -> str:
    """Returns a student's model card, a README.md with front matter; `name` may be omitted for a single student."""
    student_report = report
    if name is not None:
        models = [entry for entry in report["models"] if entry["name"] in ("teacher", name)]
        student_report = cast(Report, {**report, "models": models})
    entries = student_entries(student_report)
    int8 = [e["path"] for e in entries if (e["runtime"], e["precision"]) == ("onnxruntime", "int8")]
    return load_template("card.md.jinja").render(
        report=report,
        headline=write_headline(student_report),
        teacher=find_teacher(student_report, headline_entry(student_report)),
        summary=build_summary(report),
        scores=build_scores(report),
        score_notes=write_score_notes(report),
        wording=WORDING[report["task"]],
        measurement_notes=write_measurement_notes(student_report),
        remarks=report["data"].get("remarks", []),
        max_length=report["config"].get("data", {}).get("max_length"),
        folders={entry["runtime"]: entry["path"] for entry in reversed(entries)},
        onnx=[entry for entry in entries if entry["runtime"] == "onnxruntime"],
        int8=next(iter(int8), None),
        code=next((entry["code"] for entry in entries if entry.get("code")), None),
        shape=describe_shape(report, entries[0]["name"]),
    )


def load_template(name: str) -> "Template":
    """Loads a template from this folder; that of the page escapes its values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (
        capitalize_first,
        format_metric,
        format_ms,
        format_percent,
        format_quantity,
        format_ratio,
        format_runtime,
        format_score,
    )
    environment.filters |= {function.__name__: function for function in filters} | {"quoted": json.dumps}
    return environment.get_template(name)


def _is_listed(name: str, wording: Wording) -> bool:
    """Returns whether an entry of the report's data is listed in the table of numbers."""
    return name != "remarks" and (name != "classes" or bool(wording.labels))
