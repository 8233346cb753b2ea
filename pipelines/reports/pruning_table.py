"""The table of a pruning run: each stage's effect on every student."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pipelines.reports.formatting import (
    CORRELATIONS,
    LOWER_IS_BETTER,
    NO_VALUE,
    RUNTIMES,
    format_count,
    format_enumeration,
    format_megabytes,
    format_percent,
    format_ratio,
    format_score,
)
from pipelines.reports.schema import ModelEntry, PrunedStudent, Report, ShapeTrial, SizesEntry
from pipelines.reports.tables import ReportTable
from pipelines.reports.targets import (
    describe_outcome,
    describe_result,
    describe_target,
    find_entry,
    find_target_speed,
    format_interval,
    format_share,
    is_uncut,
    measured_speed,
    pruned_students,
    require_pruning,
    trained_share,
)
from pipelines.reports.wording import name_validation_metric


class TableRow(NamedTuple):
    """A label, and a cell for the teacher and for each student."""

    label: str
    cells: list[str]


class StageRows(NamedTuple):
    """A stage and its rows."""

    stage: str
    rows: list[TableRow]


def build_pruning_table(report: Report) -> tuple[list[str], list[StageRows]]:
    """Returns the header and the rows of each stage in order: the teacher's column first, then one per student."""
    stages = [
        StageRows("start: vocabulary", _vocabulary_rows(report)),
        StageRows("shape: pruned units", _shape_rows(report)),
        StageRows("training", _training_rows(report)),
    ]
    for precision in dict.fromkeys(entry["precision"] for entry in report["models"] if entry["precision"] != "fp32"):
        rows = [*_quantization_rows(report, precision), _score_row(report, precision), _change_row(report, precision)]
        stages.append(StageRows(precision, rows))
    stages.append(StageRows("target", _target_rows(report)))
    return ["teacher", *(student["name"] for student in pruned_students(report))], stages


def _vocabulary_rows(report: Report) -> list[TableRow]:
    pruning, teacher = require_pruning(report), find_entry(report, "teacher")
    start, students = pruning["start"], pruning["students"]
    removed = NO_VALUE
    if teacher and start["student"] == "teacher":
        removed = format_megabytes(4 * (teacher["params"] - start["params"]))
    return [
        _row("tokens of the vocabulary", f"{pruning['teacher']['tokens']:,}", [f"{start['tokens']:,}"] * len(students)),
        _row("fp32 weights removed", NO_VALUE, [removed] * len(students)),
    ]


def _shape_rows(report: Report) -> list[TableRow]:
    students, teacher = pruned_students(report), find_entry(report, "teacher")
    params = format_count(teacher["params"]) if teacher else NO_VALUE
    return [
        _units_row(report, "layers", lambda sizes: len(sizes["heads"])),
        _units_row(report, "width", lambda sizes: sizes["hidden"] or 0),
        _units_row(report, "heads", lambda sizes: sum(sizes["heads"])),
        _units_row(report, "neurons", lambda sizes: sum(sizes["ffn"])),
        _row("parameters", params, (format_count(each["params"]) for each in students)),
        _row("speedup, predicted", NO_VALUE, (format_ratio(each["predicted_speedup"]) for each in students)),
        _row(
            "speedup, measured",
            NO_VALUE,
            map(_format_measured, students),
        ),
        _row("shapes tried", NO_VALUE, (str(len(each["trials"])) for each in students)),
        _row("KL after the trials", NO_VALUE, map(_format_trial, students)),
    ]


def _units_row(report: Report, label: str, count: Callable[[SizesEntry], int]) -> TableRow:
    start = require_pruning(report)["start"]
    full = count(start["sizes"])
    cells = [f"{count(each['sizes']):,} of {full:,}" if full else NO_VALUE for each in pruned_students(report)]
    return _row(label, f"{full:,}" if full and start["student"] == "teacher" else NO_VALUE, cells)


def _training_rows(report: Report) -> list[TableRow]:
    students, metric = pruned_students(report), report["metric"]
    scores = (format_score(each["score"], metric) for each in students)
    return [
        _row(_validation_label(report), _format_optional(students[0]["teacher_score"], metric), scores),
        _row("share of the teacher's", NO_VALUE, (format_percent(trained_share(each)) for each in students)),
        _score_row(report, "fp32"),
    ]


def _quantization_rows(report: Report, precision: str) -> list[TableRow]:
    """Returns rows with the validation scores after calibration and after quantization-aware training."""
    scores = [each.get("quantized") for each in pruned_students(report)]
    if not any(each and each["precision"] == precision for each in scores):
        return []
    label, metric = _validation_label(report), report["metric"]
    calibrated = [_format_optional(each["calibrated"] if each else None, metric) for each in scores]
    trained = [_format_optional(each["score"] if each else None, metric) for each in scores]
    return [
        _row(f"{label}, calibrated", NO_VALUE, calibrated),
        _row(f"{label}, quantization-aware training", NO_VALUE, trained),
    ]


def _score_row(report: Report, precision: str) -> TableRow:
    """Returns the row of test scores in a precision."""
    metric = report["metric"]
    cells = [_format_optional(entry["score"] if entry else None, metric) for entry in _entries(report, precision)]
    return TableRow(f"test {metric}, {precision}", cells)


def _change_row(report: Report, precision: str) -> TableRow:
    """Returns the row of score changes by quantization, in percentage points if the score is a share."""
    is_share = report["metric"] not in CORRELATIONS | LOWER_IS_BETTER
    cells = []
    for full, quantized in zip(_entries(report, "fp32"), _entries(report, precision), strict=True):
        if full is None or quantized is None:
            cells.append(NO_VALUE)
        else:
            change = quantized["score"] - full["score"]
            cells.append(f"{change * 100:+.2f} points" if is_share else f"{change:+.4f}")
    return TableRow(f"change by {precision}", cells)


def _target_rows(report: Report) -> list[TableRow]:
    students = pruned_students(report)
    speeds = [(each["target"], measured_speed(report, each)) for each in students]
    results = (describe_result(target, speed) for target, speed in speeds)
    intervals = (format_interval(target, speed) or NO_VALUE for target, speed in speeds)
    return [
        _row("requested", NO_VALUE, (describe_target(each["target"]) for each in students)),
        _row("measured", NO_VALUE, results),
        _row("95 % interval", NO_VALUE, intervals),
        _size_row(report),
    ]


def _size_row(report: Report) -> TableRow:
    """Returns the row of sizes on disk, in the budget's precision."""
    precision = require_pruning(report)["conditions"]["precision"]
    entries = [*_entries(report, "fp32")[:1], *_entries(report, precision)[1:]]
    cells = [format_megabytes(entry["bytes"]) if entry else NO_VALUE for entry in entries]
    label = "on disk, fp32" if precision == "fp32" else f"on disk (teacher fp32, students {precision})"
    return TableRow(label, cells)


def _row(label: str, teacher: str, students: Iterable[str]) -> TableRow:
    return TableRow(label, [teacher, *students])


def _entries(report: Report, precision: str) -> list[ModelEntry | None]:
    """Returns the entries of the teacher and the students on the budget's runtime."""
    names = ["teacher", *(student["name"] for student in pruned_students(report))]
    return [find_entry(report, name, precision) for name in names]


def _validation_label(report: Report) -> str:
    return f"validation {name_validation_metric(report)}"


def _format_optional(score: float | None, metric: str) -> str:
    return NO_VALUE if score is None else format_score(score, metric)


def _format_measured(student: PrunedStudent) -> str:
    """Returns the speedup of the chosen shape by all its measurements."""
    return format_ratio(student["measurements"][-1]["pooled_speedup"])


def _format_trial(student: PrunedStudent) -> str:
    """Returns the final divergence of the shape that won the trials."""
    best = best_trial(student["trials"])
    return NO_VALUE if best is None else f"{student['trials'][best]['divergences'][-1]:.3f}"


def best_trial(trials: Sequence[ShapeTrial]) -> int | None:
    """Returns the index of the best trial among those that ran longest; None if nothing was trained."""
    ranked = [
        (-len(each["divergences"]), each["divergences"][-1], i) for i, each in enumerate(trials) if each["divergences"]
    ]
    return min(ranked)[2] if ranked else None


def write_pruning_notes(report: Report) -> list[str]:
    """Returns sentences on how the table's figures were measured."""
    conditions, students = require_pruning(report)["conditions"], pruned_students(report)
    lengths = conditions["length"] if isinstance(conditions["length"], list) else [conditions["length"]]
    length = format_enumeration([f"of {each} tokens" if each else "of the data set's own lengths" for each in lengths])
    runtime = RUNTIMES.get(conditions["runtime"], conditions["runtime"])
    texts = f"{conditions['batch']} text{'s' * (conditions['batch'] > 1)} per call"
    source = "validation texts, when the shape was chosen"
    if find_target_speed(report, students[0]):
        source = "the texts of the evaluation"
    notes = [
        f"A target's speedup is the teacher's fp32 latency divided by the student's in {conditions['precision']} on "
        f"{runtime}: {texts}, {length}, threads: {conditions['threads']}. The measured values of the targets are from "
        f"{source}.",
        "The predicted speedup is that of the cost model; the measured one is that of the shape before its training.",
        "KL is the divergence from the teacher on the validation split after the short trial trainings by which the "
        "shape is chosen. The chosen shape may have gained or lost units afterwards until it met the requested speed.",
    ]
    if whole := [each["name"] for each in students if is_uncut(report, each)]:
        notes.append(
            f"{format_enumeration(whole)} {'has' if len(whole) == 1 else 'have'} all layers and units: the whole model "
            f"in {conditions['precision']} is fast enough. A lower speed would keep no more"
            + ("; fp32 (--budget.precision) would, if it is fast enough." if conditions["precision"] == "int8" else ".")
        )
    if any(each["teacher_score"] for each in students):
        notes.append(
            "Validation scores are those of the trained fp32 weights; the required score is checked on the deployed "
            "files."
        )
    return notes


def build_speed_table(report: Report) -> ReportTable | None:
    """Returns the table of the requested speeds and those that were reached; None if no speed was requested."""
    if not pruned_students(report):
        return None
    header = ["student", "requested", "measured", "95 % interval", "outcome", "copy of the teacher"]
    rows = []
    for student in pruned_students(report):
        target, speed = student["target"], measured_speed(report, student)
        measured = find_target_speed(report, student)
        copy = format_ratio(measured["control"]["value"]) if measured else NO_VALUE
        value, interval = format_share(target, speed.share), format_interval(target, speed) or NO_VALUE
        rows.append([student["name"], describe_target(target), value, interval, describe_outcome(speed), copy])
    return ReportTable(header, rows)


def describe_shape(report: Report, name: str) -> str | None:
    """Returns a pruned student's sizes as a phrase; None if it wasn't pruned."""
    student = next((each for each in pruned_students(report) if each["name"] == name), None)
    if student is None:
        return None
    sizes = student["sizes"]
    layers = f"{len(sizes['heads'])} layer{'s' * (len(sizes['heads']) > 1)}"
    width = f" of width {sizes['hidden']}" if sizes["hidden"] else ""
    return (
        f"{layers}{width} with {_format_sizes(sizes['heads'])} attention heads and "
        f"{_format_sizes(sizes['ffn'])} feed-forward neurons"
    )


def _format_sizes(counts: Sequence[int]) -> str:
    """Returns the counts of all layers; a single number if all are equal."""
    texts = [f"{count:,}" for count in counts]
    return format_enumeration(texts if len(set(texts)) > 1 else texts[:1])
