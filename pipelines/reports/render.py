"""Renders a finished report as an HTML page, model cards and terminal tables."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.reports.charts import colours_of, speed_charts, stage_charts, standalone_svg
from pipelines.reports.numbers import (
    LOWER,
    Report,
    Row,
    capitalize_first,
    count_text,
    counted,
    direction_text,
    listed,
    metric_text,
    ms_text,
    percent_text,
    runtime_text,
    score_text,
    times_text,
)
from pipelines.reports.pareto import pareto_charts
from pipelines.reports.steps_text import judged, pruning_notes, pruning_table, shape_text, verdicts, winner
from pipelines.reports.wording import WORDING, Wording, parity_text, validated_text

NONE = "–"
Chart = tuple[str, str]  # caption, SVG


@dataclass(frozen=True)
class Charts:
    """Charts of the models' speed and size, and of each stage's training."""

    speed: Sequence[Chart]
    stages: Mapping[str, Sequence[Chart]]

    @classmethod
    def of(cls, report: Report, curves: Mapping[str, Sequence[Row]]) -> "Charts":
        metric = validated_text(report)
        stages = {stage: stage_charts(rows, metric) for stage, rows in curves.items()}
        return cls(speed_charts(report) + pareto_charts(report), stages)

    def files(self) -> dict[str, str]:
        """Returns file name -> standalone SVG of each chart."""
        found = dict(self.speed)
        for stage, charts in self.stages.items():
            found |= {f"{stage} {caption}": svg for caption, svg in charts}
        return {
            re.sub(r"\W+", "-", name.lower()).strip("-") + ".svg": standalone_svg(svg) for name, svg in found.items()
        }


def render_html(report: dict[str, Any], curves: Mapping[str, Sequence[Row]]) -> str:
    """Returns the report as a self-contained page that loads no other file.

    Args:
        report: The finished report.
        curves: Stage -> rows of its training log.
    """
    return render_page(report, Charts.of(report, curves))


def render_page(report: dict[str, Any], charts: Charts) -> str:
    """Returns the page with charts that are already drawn."""
    several, words = family(report), WORDING[report["task"]]
    return template("report.html.jinja").render(
        report=report,
        headline=headline(report),
        best=headline_entry(report),
        why_best=why_shown(report) if several else None,
        teacher=teacher_of(report, headline_entry(report)),
        summary=summary_rows(report),
        scores=score_rows(report),
        score_notes=score_notes(report),
        words=words,
        data={name: value for name, value in report["data"].items() if shows(name, words)},
        remarks=report["data"].get("remarks", []),
        measured=measurement_notes(report),
        charts=charts,
        config=json.dumps(report["config"], indent=2, default=str, ensure_ascii=False),
        dots=colours_of(entry["name"] for entry in report["models"]) if several else {},
        road=pruning_section(report) if report.get("road") else None,
    )


def shows(name: str, words: Wording) -> bool:
    """Returns whether an entry of the report's data is listed in the table of numbers."""
    return name != "remarks" and (name != "classes" or bool(words.labels))


def pruning_section(report: Report) -> dict[str, Any]:
    header, stages = pruning_table(report)
    trials = [
        (each["name"], winner(each["trials"]), each["trials"])
        for each in report["road"]["students"]
        if winner(each["trials"]) is not None
    ]
    return {
        "header": header,
        "stages": stages,
        "verdicts": verdicts(report),
        "notes": pruning_notes(report),
        "trials": trials,
    }


def render_cards(report: dict[str, Any]) -> dict[str, str]:
    """Returns file name -> Hugging Face model card: README.md of a single student, or NAME.md of each of several."""
    if not family(report):
        return {"README.md": render_card(report)}
    return {f"{name}.md": render_card(report, name) for name in family(report)}


def render_card(report: dict[str, Any], name: str | None = None) -> str:
    """Returns a student's model card, a README.md with front matter; `name` may be omitted for a single student."""
    own = (
        report if name is None else report | {"models": [e for e in report["models"] if e["name"] in ("teacher", name)]}
    )
    mine = students(own)
    folders = {entry["runtime"]: entry["path"].removesuffix("/model.onnx") for entry in reversed(mine)}
    return template("card.md.jinja").render(
        report=report,
        headline=headline(own),
        teacher=teacher_of(own, headline_entry(own)),
        summary=summary_rows(report),
        scores=score_rows(report),
        score_notes=score_notes(report),
        words=WORDING[report["task"]],
        measured=measurement_notes(own),
        remarks=report["data"].get("remarks", []),
        max_length=report["config"].get("data", {}).get("max_length"),
        folders=folders,
        onnx=[entry for entry in mine if entry["runtime"] == "onnxruntime"],
        int8=next((e["path"] for e in mine if (e["runtime"], e["precision"]) == ("onnxruntime", "int8")), None),
        code=next((entry["code"] for entry in mine if entry.get("code")), None),
        shape=shape_text(report, mine[0]["name"]),
    )


def summary_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of the final table; speedups are against the teacher on the same runtime."""
    header = ["model", "runtime", report["metric"], "params", "size in MB", "ms, batch 1", "speedup", "agreement"]
    rows = [
        [
            entry["name"],
            runtime_text(entry),
            score_text(entry["score"], report["metric"]),
            count_text(entry["params"]),
            f"{entry['bytes'] / 1e6:.1f}",
            ms_text(entry["latency"]["best_ms"]),
            times_text((entry["speedup"] or {}).get("vs_teacher_same_runtime")),
            percent_text(entry["agreement_with_teacher"]),
        ]
        for entry in report["models"]
    ]
    if baseline := report.get("baseline"):
        rows.append([baseline["name"], NONE, baseline_text(report, report["metric"]), *[NONE] * (len(header) - 3)])
    return header, rows


def baseline_text(report: Report, name: str) -> str:
    """Returns one of the scores that the baseline without a model reaches."""
    score = report["baseline"]["scores"].get(name)
    return NONE if score is None else score_text(score, name)


def score_rows(report: Report) -> tuple[list[str], list[list[str]]] | None:
    """Returns header and rows of all scores, the teacher's first; None if the task has a single score."""
    models = sorted(report["models"], key=lambda entry: entry["name"] != "teacher")
    names = list(dict.fromkeys(name for entry in models for name in entry.get("scores", {})))
    if len(names) < 2:
        return None
    header = ["model", "runtime", *(f"{name} ({direction_text(name)})" if name in LOWER else name for name in names)]
    rows = [
        [
            entry["name"],
            runtime_text(entry),
            *(score_text(entry.get("scores", {}).get(name, math.nan), name) for name in names),
        ]
        for entry in models
    ]
    if baseline := report.get("baseline"):
        rows.append([baseline["name"], NONE, *(baseline_text(report, name) for name in names)])
    return header, rows


def score_notes(report: Report) -> list[str]:
    """Returns an explanation of each score, and whether higher or lower is better."""
    said = WORDING[report["task"]].scores
    names = dict.fromkeys(name for entry in report["models"] for name in entry.get("scores", {}))
    notes = [f"{capitalize_first(name)}: {said[name]}; {direction_text(name)}." for name in names if name in said]
    compared = {entry["name"]: entry["agreement_with_teacher"] for entry in report["models"] if entry["speedup"]}
    if apart := [name for name, agreement in compared.items() if agreement is None]:
        notes.append(f"Scores of {listed(apart)} are of other tokens than the teacher's, cut by another tokenizer.")
    return notes


def students(report: Report) -> Sequence[Row]:
    """Returns the students' entries, or all entries if there are none."""
    return [entry for entry in report["models"] if entry["name"] != "teacher"] or report["models"]


def family(report: Report) -> list[str]:
    """Returns the names of the students if a run has several, otherwise an empty list."""
    names = list(dict.fromkeys(entry["name"] for entry in report["models"] if entry["name"] != "teacher"))
    return names if len(names) > 1 else []


def deployed(report: Report, entries: Sequence[Row]) -> Row:
    """Returns the entry with the lowest latency, if possible among those in the budget's runtime and precision."""
    wanted = (report.get("road") or {}).get("conditions", {})
    meant = [each for each in entries if all(each[key] == wanted.get(key) for key in ("runtime", "precision"))]
    return min(meant or entries, key=lambda entry: entry["latency"]["best_ms"])


def headline_entry(report: Report) -> Row:
    """Returns the entry that represents the result: the fastest, see `deployed`.

    Of several students it must keep the required score; if none does, it is the most accurate student's.
    """
    entries = students(report)
    if family(report) and (least := least_score(report)):
        shares = {each["name"]: judged(report, each) for each in report["road"]["students"]}
        good = [entry for entry in entries if (shares.get(entry["name"]) or 0) >= least]
        best = max(entries, key=lambda entry: shares.get(entry["name"]) or 0)["name"]
        entries = good or [entry for entry in entries if entry["name"] == best]
    return deployed(report, entries)


def least_score(report: Report) -> float:
    """Returns the required share of the teacher's score; 0 if none is required or the share is unknown."""
    known = any(judged(report, each) for each in (report.get("road") or {}).get("students", []))
    return report["config"].get("budget", {}).get("min_score", 0) if known else 0


def why_shown(report: Report) -> str:
    """Returns a sentence that explains which student the figures at the top belong to."""
    name, least = headline_entry(report)["name"], least_score(report)
    if not least:
        return f"The figures below are those of {name}, the fastest."
    asked = f"at least {percent_text(least)} of the teacher's validation {validated_text(report)}"
    share = next(judged(report, each) or 0 for each in report["road"]["students"] if each["name"] == name)
    if share < least:
        return f"No student keeps {asked}, as was asked; the figures below are those of {name}, which keeps most."
    return f"The figures below are those of {name}, the fastest that keeps {asked}."


def teacher_of(report: Report, entry: Row) -> Row | None:
    """Returns the teacher's entry to compare with, in the same runtime and precision if there is one."""
    teachers = [other for other in report["models"] if other["name"] == "teacher" and other is not entry]
    keys = ("runtime", "precision")
    return min(teachers, key=lambda other: [other[key] != entry[key] for key in keys], default=None)


def headline(report: Report) -> str:
    """Returns the result in one sentence that names every student."""
    found = [deployed(report, [e for e in report["models"] if e["name"] == name]) for name in family(report)]
    if not found:
        return headline_of_one(report, headline_entry(report))
    runtimes = list(dict.fromkeys(map(runtime_text, found)))
    said = listed([family_part(report, entry, first=i == 0) for i, entry in enumerate(found)])
    return f"{capitalize_first(said)}, on {listed(runtimes)}."


def family_part(report: Report, entry: Row, *, first: bool) -> str:
    """Returns a student's part of that sentence; only the first part is written out in full."""
    name, metric, teacher = entry["name"], metric_text(report["metric"]), teacher_of(report, entry)
    speedup = (entry["speedup"] or {}).get("vs_teacher_same_runtime")
    share = share_of(entry, teacher)
    if speedup is None or share is None:
        took = f"{ms_text(entry['latency']['best_ms'])} ms a text"
        return f"{name} reaches {score_text(entry['score'], report['metric'])} {metric} in {took}"
    if first:
        return f"{name} keeps {percent_text(share)} of the teacher's {metric} at {times_text(speedup)} its speed"
    return f"{name} {percent_text(share)} at {times_text(speedup)}"


def share_of(entry: Row, teacher: Row | None) -> float | None:
    """Returns the share of the teacher's score; None if it is meaningless.

    The score of a barely trained teacher can be 0, a correlation can be negative, or NaN with constant predictions.
    """
    if teacher is None or not teacher["score"] > 0 or not math.isfinite(entry["score"]):
        return None
    return entry["score"] / teacher["score"]


def headline_of_one(report: Report, entry: Row) -> str:
    """Returns the result of a single student in one sentence."""
    metric = metric_text(report["metric"])
    teacher, speedup = teacher_of(report, entry), (entry["speedup"] or {}).get("vs_teacher_same_runtime")
    took = f"{ms_text(entry['latency']['best_ms'])} ms a text on {runtime_text(entry)}"
    if (share := share_of(entry, teacher)) is None:
        return f"The {entry['name']} reaches {score_text(entry['score'], report['metric'])} {metric} in {took}."
    keeps = f"The {entry['name']} keeps {percent_text(share)} of the teacher's {metric}"
    if speedup is None:
        return f"{keeps} and takes {took}."
    return f"{keeps} at {times_text(speedup)} its speed on {runtime_text(entry)}."


def measurement_notes(report: Report) -> list[str]:
    """Returns sentences on how the figures were measured."""
    entry, metric, test = headline_entry(report), report["metric"], report["data"]["test"]
    took, score, words = entry["latency"], score_text(entry["score"], metric), WORDING[report["task"]]
    said = [f"{capitalize_first(metric_text(metric))} is taken on the {counted(test, words.rows)} of the test split."]
    if report["task"] == "text-classification" and test:
        error = math.sqrt(entry["score"] * (1 - entry["score"]) / test)
        said.append(f"The standard error of an accuracy of {score} on {test:,} texts is {error * 100:.2f} points.")
    if baseline := report.get("baseline"):
        rows = counted(test, words.rows)
        said.append(
            f"{capitalize_first(baseline['name'])}: the score of giving each of the {rows} {baseline['answer']}."
        )
    said.append(
        f"Latency is that of each text's fastest call, the median over the texts, of {took['repeats']:,} calls in this "
        f"run ({report['machine']['processor']}, threads: {took['threads']}) on texts of about {took['length']} "
        "tokens; all models take turns, block by block of the same texts. What else the machine does makes calls "
        "slower: charts go on to the 90 % quantile of all calls. Tokenization is not counted."
    )
    if entry["speedup"]:
        said.append("A speedup is the teacher's latency divided by the model's.")
    if entry["agreement_with_teacher"] is not None:
        about, decision = words.decided
        said.append(
            f"Agreement is the share of the {about} that get the same {decision} from the model and the teacher."
        )
    said += [parity_text(other, *words.compared) for other in report["models"] if other["parity"]]
    return said + [
        f"{each['stage']}: {each['target']} was refused and lies aside in {each['where']}: {each['reason']}."
        for each in report.get("refused", [])
    ]


def template(name: str) -> Any:
    """Loads a template from this folder; that of the page escapes its values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts = (score_text, metric_text, percent_text, times_text, ms_text, runtime_text, capitalize_first, counted)
    environment.filters |= {text.__name__: text for text in texts} | {"quoted": json.dumps}
    return environment.get_template(name)
