"""Whether the students of a pruning run met the requested speed and score."""

from collections.abc import Iterable
from typing import NamedTuple

from pipelines.reports.formatting import format_percent, format_ratio
from pipelines.reports.schema import (
    LatencyEntry,
    ModelEntry,
    PrunedStudent,
    PruningSummary,
    Report,
    TargetEntry,
    TimingConditions,
)


class Verdict(NamedTuple):
    """Whether a request was met, and a sentence about it."""

    met: bool
    sentence: str


class MeasuredSpeed(NamedTuple):
    """A student's speed under the conditions of its budget."""

    speedup: float
    milliseconds: float


def pruning_of(report: Report) -> PruningSummary:
    """Returns the report's facts on pruning.

    Raises:
        ValueError: No student was pruned.
    """
    if "pruning" not in report:
        raise ValueError("report: expected facts on pruning, found none: the run pruned no student")
    return report["pruning"]


def pruned_students(report: Report) -> list[PrunedStudent]:
    """Returns the facts on each pruned student; none if no student was pruned."""
    return list(report["pruning"]["students"]) if report.get("pruning") else []


def required_share(report: Report) -> float:
    """Returns the required share of the teacher's validation score; 0 if none is required."""
    return float(report["config"].get("budget", {}).get("min_score", 0))


def write_verdicts(report: Report) -> list[Verdict]:
    """Returns a verdict for each target, and for the required score of each student."""
    found = []
    required = required_share(report)
    for student in pruned_students(report):
        name, target, speed = student["name"], student["target"], measured_speed(report, student)
        shortfall = find_shortfall(target, speed)
        outcome = f"missed by {format_percent(shortfall)}" if shortfall > 0 else "met"
        request = f"requested {describe_target(target)}, measured {format_speed(target, speed)}"
        found.append(Verdict(shortfall <= 0, f"{name}: {request}: {outcome}."))
        share = deployed_share(report, student)
        if required and share is not None:
            score = f"the teacher's validation {report['metric']}"
            request = f"required {format_percent(required)} of {score}, kept {format_percent(share, 2)}"
            found.append(Verdict(share >= required, f"{name}: {request}: {'met' if share >= required else 'missed'}."))
    return found


def describe_target(target: TargetEntry) -> str:
    """Returns the requested latency or speedup."""
    return f"{target['latency_ms']:g} ms" if target["latency_ms"] else f"{target['speedup']:g}×"


def describe_result(target: TargetEntry, speed: MeasuredSpeed) -> str:
    """Returns the measured latency or speedup, and by how much the target was missed."""
    shortfall, value = find_shortfall(target, speed), format_speed(target, speed)
    return value if shortfall <= 0 else f"{value}, missed by {format_percent(shortfall)}"


def format_speed(target: TargetEntry, speed: MeasuredSpeed) -> str:
    """Formats the measured latency or speedup, whichever was requested."""
    return f"{speed.milliseconds:.2f} ms" if target["latency_ms"] else format_ratio(speed.speedup)


def find_shortfall(target: TargetEntry, speed: MeasuredSpeed) -> float:
    """Returns the relative shortfall of the speed met against the requested speed; at most 0 if it is met."""
    if target["latency_ms"]:
        return 1 - target["latency_ms"] / speed.milliseconds
    return 1 - speed.speedup / target["speedup"]


def measured_speed(report: Report, student: PrunedStudent) -> MeasuredSpeed:
    """Returns the student's speed under the budget's conditions.

    It is taken from the evaluation, or from the shape stage if the evaluation's conditions differ.
    """
    last = student["measurements"][-1]
    return evaluated_speed(report, student) or MeasuredSpeed(last["speedup"], last["best_ms"])


def evaluated_speed(report: Report, student: PrunedStudent) -> MeasuredSpeed | None:
    """Returns `measured_speed` from the evaluation; None if it wasn't measured under the budget's conditions."""
    conditions = pruning_of(report)["conditions"]
    entry = find_entry(report, student["name"], conditions["precision"])
    if entry is None:
        return None
    pairs = ((entry["latency"], entry["speedup"]), (entry["latency_batched"], entry["speedup_batched"]))
    for latency, speedup in pairs:
        ratio = speedup["vs_teacher_same_runtime"] if speedup else None
        if ratio and latency and has_conditions(latency, conditions):
            return MeasuredSpeed(ratio, latency["best_ms"])
    return None


def has_conditions(latency: LatencyEntry, conditions: TimingConditions) -> bool:
    """Returns whether a latency was measured under the budget's conditions."""
    same_batch = latency["batch"] == conditions["batch"]
    return not conditions["length"] and same_batch and latency["threads"] == conditions["threads"]


def find_entry(report: Report, name: str, precision: str = "fp32") -> ModelEntry | None:
    """Returns a model's entry on the budget's runtime; None if there is none."""
    key = (name, pruning_of(report)["conditions"]["runtime"], precision)
    return next((e for e in report["models"] if (e["name"], e["runtime"], e["precision"]) == key), None)


def trained_share(student: PrunedStudent) -> float | None:
    """Returns the share of the teacher's validation score that the student's fp32 weights keep."""
    return student["score"] / student["teacher_score"] if student["teacher_score"] else None


def deployed_shares(models: Iterable[ModelEntry]) -> dict[str, float]:
    """Returns student -> share of the teacher's validation score that its deployed file keeps, where measured."""
    scores = {entry["name"]: entry["validation"] for entry in models if "validation" in entry}
    teacher = scores.pop("teacher", None)
    return {name: score / teacher for name, score in scores.items()} if teacher else {}


def deployed_share(report: Report, student: PrunedStudent) -> float | None:
    """Returns the share compared with the required score: of the deployed file, or else of the trained weights."""
    return deployed_shares(report["models"]).get(student["name"], trained_share(student))
