"""The result of a run in one sentence, and the entries of the report that it is about."""

import math
from collections.abc import Mapping, Sequence

from pipelines.reports.formatting import (
    capitalize_first,
    format_enumeration,
    format_metric,
    format_ms,
    format_percent,
    format_ratio,
    format_runtime,
    format_score,
)
from pipelines.reports.schema import ModelEntry, Report
from pipelines.reports.targets import deployed_share, deployed_shares, pruned_students, required_share
from pipelines.reports.wording import name_validation_metric


def write_headline(report: Report) -> str:
    """Returns the result in one sentence that names every student."""
    names = family_names(report)
    if not names:
        return _describe_single(report, headline_entry(report))
    entries = [choose_deployed(report, [e for e in report["models"] if e["name"] == name]) for name in names]
    runtimes = list(dict.fromkeys(map(format_runtime, entries)))
    results = format_enumeration([_describe_member(report, entry, first=i == 0) for i, entry in enumerate(entries)])
    return f"{capitalize_first(results)}, on {format_enumeration(runtimes)}."


def explain_headline_entry(report: Report) -> str:
    """Returns a sentence that explains which student the figures at the top belong to."""
    required = _comparable_share(report)
    shares = _family_shares(report)
    name = _choose_entry(report, shares, required)["name"]
    if not required:
        return f"The figures below are those of {name}, the fastest student."
    metric = report["metric"] if name in deployed_shares(report["models"]) else name_validation_metric(report)
    request = f"at least {format_percent(required)} of the teacher's validation {metric}"
    if shares[name] < required:
        return f"No student keeps {request}, as requested; the figures below are those of {name}, which keeps the most."
    return f"The figures below are those of {name}, the fastest student that keeps {request}."


def headline_entry(report: Report) -> ModelEntry:
    """Returns the entry that represents the result: the fastest, see `choose_deployed`.

    Of several students it must keep the required score; if none does, it is the most accurate student's.
    """
    return _choose_entry(report, _family_shares(report), _comparable_share(report))


def choose_deployed(report: Report, entries: Sequence[ModelEntry]) -> ModelEntry:
    """Returns the entry with the lowest latency, if possible among those in the budget's runtime and precision."""
    requested: list[ModelEntry] = []
    if "pruning" in report:
        conditions = report["pruning"]["conditions"]
        target = (conditions["runtime"], conditions["precision"])
        requested = [entry for entry in entries if (entry["runtime"], entry["precision"]) == target]
    return min(requested or entries, key=lambda entry: entry["latency"]["best_ms"])


def student_entries(report: Report) -> Sequence[ModelEntry]:
    """Returns the students' entries, or all entries if there are none."""
    return [entry for entry in report["models"] if entry["name"] != "teacher"] or report["models"]


def family_names(report: Report) -> list[str]:
    """Returns the names of the students if a run has several, otherwise an empty list."""
    names = list(dict.fromkeys(entry["name"] for entry in report["models"] if entry["name"] != "teacher"))
    return names if len(names) > 1 else []


def find_teacher(report: Report, entry: ModelEntry) -> ModelEntry | None:
    """Returns the teacher's entry to compare with, in the same runtime and precision if there is one."""
    teachers = [other for other in report["models"] if other["name"] == "teacher" and other is not entry]

    def differences(other: ModelEntry) -> tuple[bool, bool]:
        return other["runtime"] != entry["runtime"], other["precision"] != entry["precision"]

    return min(teachers, key=differences, default=None)


def read_speedup(entry: ModelEntry) -> float | None:
    """Returns the speedup over the teacher on the same runtime; None if it is unknown."""
    return entry["speedup"]["vs_teacher_same_runtime"] if entry["speedup"] else None


def _comparable_share(report: Report) -> float:
    """Returns the required share of the teacher's score; 0 if none is required or no student's share is known."""
    is_known = any(deployed_share(report, each) for each in pruned_students(report))
    return required_share(report) if is_known else 0


def _family_shares(report: Report) -> dict[str, float]:
    """Returns student -> the share of the teacher's score that it keeps, 0 where that is unknown."""
    return {each["name"]: deployed_share(report, each) or 0 for each in pruned_students(report)}


def _choose_entry(report: Report, shares: Mapping[str, float], required: float) -> ModelEntry:
    entries = student_entries(report)
    if family_names(report) and required:
        sufficient = [entry for entry in entries if shares.get(entry["name"], 0) >= required]
        best = max(entries, key=lambda entry: shares.get(entry["name"], 0))["name"]
        entries = sufficient or [entry for entry in entries if entry["name"] == best]
    return choose_deployed(report, entries)


def _describe_member(report: Report, entry: ModelEntry, *, first: bool) -> str:
    """Returns a student's part of a family's headline; only the first part is written out in full."""
    name, metric, speedup = entry["name"], format_metric(report["metric"]), read_speedup(entry)
    share = _share_of_teacher(entry, find_teacher(report, entry))
    if speedup is None or share is None:
        latency = f"{format_ms(entry['latency']['best_ms'])} ms per text"
        return f"{name} reaches {format_score(entry['score'], report['metric'])} {metric} in {latency}"
    if first:
        return f"{name} keeps {format_percent(share)} of the teacher's {metric} at {format_ratio(speedup)} its speed"
    return f"{name} {format_percent(share)} at {format_ratio(speedup)}"


def _describe_single(report: Report, entry: ModelEntry) -> str:
    """Returns the result of a single model in one sentence; a student needs no name where it is the only one."""
    model = "teacher" if entry["name"] == "teacher" else "student"
    metric, speedup = format_metric(report["metric"]), read_speedup(entry)
    share = _share_of_teacher(entry, find_teacher(report, entry))
    latency = f"{format_ms(entry['latency']['best_ms'])} ms per text on {format_runtime(entry)}"
    if share is None:
        return f"The {model} reaches {format_score(entry['score'], report['metric'])} {metric} in {latency}."
    opening = f"The {model} keeps {format_percent(share)} of the teacher's {metric}"
    if speedup is None:
        return f"{opening} and takes {latency}."
    return f"{opening} at {format_ratio(speedup)} its speed on {format_runtime(entry)}."


def _share_of_teacher(entry: ModelEntry, teacher: ModelEntry | None) -> float | None:
    """Returns the share of the teacher's score; None if it is meaningless.

    The score of a barely trained teacher can be 0, a correlation can be negative, or NaN with constant predictions.
    """
    if teacher is None or not teacher["score"] > 0 or not math.isfinite(entry["score"]):
        return None
    return entry["score"] / teacher["score"]
