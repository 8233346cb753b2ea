"""Whether the students of a pruning run met the requested speed and score."""

from collections.abc import Iterable
from typing import NamedTuple

from compress.measure.load import BUSY
from compress.prune.budget import TOLERANCE
from pipelines.reports.formatting import capitalize_first, format_percent, format_ratio
from pipelines.reports.schema import (
    ModelEntry,
    PrunedStudent,
    PruningSummary,
    Report,
    SpeedMeasurement,
    TargetEntry,
    TargetSpeed,
)


class Verdict(NamedTuple):
    """Whether a request was met, and a sentence about it."""

    met: bool
    sentence: str


class MeasuredSpeed(NamedTuple):
    """A student's speed relative to the requested one, with its interval; the interval is unknown before evaluation."""

    share: float
    low: float | None = None
    high: float | None = None


def require_pruning(report: Report) -> PruningSummary:
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
    return float(report["config"].get("budget", {}).get("min_score_share", 0))


def write_verdicts(report: Report) -> list[Verdict]:
    """Returns a verdict for each target, and for the required score of each student."""
    verdicts = []
    required = required_share(report)
    for student in pruned_students(report):
        name, target, speed = student["name"], student["target"], measured_speed(report, student)
        request = f"requested {describe_target(target)}, measured {format_speed(target, speed)}"
        missed = 1 - speed.share > TOLERANCE
        verdicts.append(
            Verdict(not missed, f"{name}: {request}: {describe_outcome(speed)}.{explain_speed(report, student)}")
        )
        share = deployed_share(report, student)
        if required and share is not None:
            score = f"the teacher's validation {report['metric']}"
            request = f"required {format_percent(required)} of {score}, kept {format_percent(share, 2)}"
            verdicts.append(
                Verdict(share >= required, f"{name}: {request}: {'met' if share >= required else 'missed'}.")
            )
    return verdicts


def describe_target(target: TargetEntry) -> str:
    """Returns the requested latency, throughput or speedup."""
    if throughput := target.get("texts_per_second"):
        return f"{throughput:,g} texts/s"
    return f"{target['latency_ms']:g} ms" if target["latency_ms"] else f"{target['speedup']:g}×"


def format_share(target: TargetEntry, share: float) -> str:
    """Formats a speed, given relative to the requested one, in the unit of the request."""
    if throughput := target.get("texts_per_second"):
        return f"{share * throughput:,.1f} texts/s"
    if target["latency_ms"]:
        milliseconds = target["latency_ms"] / share
        return f"{milliseconds:.{2 if milliseconds >= 0.1 else 3}f} ms"
    return format_ratio(share * target["speedup"])


def describe_result(target: TargetEntry, speed: MeasuredSpeed) -> str:
    """Returns the measured latency, throughput or speedup, and by how much the target was missed."""
    value, outcome = format_share(target, speed.share), describe_outcome(speed)
    return value if outcome == "met" else f"{value}, {outcome}"


def describe_outcome(speed: MeasuredSpeed) -> str:
    """Returns whether a target was met, or how far below it a student is."""
    shortfall = 1 - speed.share
    if shortfall <= 0:
        return "met"
    return f"{'missed by' if shortfall > TOLERANCE else 'short by'} {format_percent(shortfall)}"


def format_speed(target: TargetEntry, speed: MeasuredSpeed) -> str:
    """Formats the measured latency, throughput or speedup with its interval, where it is known."""
    interval = format_interval(target, speed)
    return format_share(target, speed.share) + (f" (95 % interval {interval})" if interval else "")


def format_interval(target: TargetEntry, speed: MeasuredSpeed) -> str:
    """Formats the interval of a speed, the lower number first; empty if it is unknown."""
    if not speed.low or speed.high is None:
        return ""
    low, high = format_share(target, speed.low), format_share(target, speed.high)
    is_latency = target["latency_ms"] and not target.get("texts_per_second")
    return f"{high} to {low}" if is_latency else f"{low} to {high}"


def explain_speed(report: Report, student: PrunedStudent) -> str:
    """Returns sentences on the measurement and on why it isn't the requested speed; empty without an evaluation."""
    measured = find_target_speed(report, student)
    if measured is None:
        return ""
    sentences = [capitalize_first(describe_measurement(measured)), *explain_retries(measured)]
    if measured["share"]["value"] > 1 + TOLERANCE:
        sentences.append(explain_excess(report, student))
    return "".join(f" {each}." for each in sentences)


def describe_measurement(measured: SpeedMeasurement) -> str:
    """Returns on what a speed was measured, and how far two copies of the teacher's file differed meanwhile."""
    control = abs(measured["control"]["value"] - 1)
    length = f" of {measured['length']} tokens" if measured["length"] else ""
    unsettled = "" if measured["settled"] else ", until the limit of time or texts, before the interval was narrow"
    load = describe_load(measured["other_load"])
    return (
        f"timed on {measured['texts']} texts{length}, {measured['rounds']} times each{unsettled}; two copies of the "
        f"teacher's file differed by {format_percent(control)}{f'; meanwhile {load}' if load else ''}"
    )


def describe_load(share: float | None) -> str:
    """Returns how much other processes did while models were timed; empty if too little to matter, or unknown."""
    if share is None or share < BUSY:
        return ""
    return f"other processes used {format_percent(share, 0)} of this machine's processors, so latencies may be too high"


def explain_retries(measured: TargetSpeed) -> list[str]:
    """Returns sentences on how often the student was cut again for being too slow, and why not again."""
    count, reason = measured["retries"], measured["reason"]
    sentences = [f"It was pruned and trained again {'once' if count == 1 else f'{count} times'}"] if count else []
    return sentences + ([f"It wasn't pruned again: {reason}"] if reason else [])


def explain_excess(report: Report, student: PrunedStudent) -> str:
    """Returns a sentence on why a student is faster than requested."""
    if is_uncut(report, student):
        return "It is faster than requested although it has all layers and units"
    earlier = format_share(student["target"], searched_speed(student).share)
    return (
        f"It was {earlier} on validation texts when its shape was chosen: texts and the load on the machine differ, "
        "and a student that is fast enough stays as it is"
    )


def is_uncut(report: Report, student: PrunedStudent) -> bool:
    """Returns whether no unit was removed from a student, so that its speed is that of its precision and tokens."""
    start, sizes = require_pruning(report)["start"]["sizes"], student["sizes"]
    same_width = start["hidden"] is None or start["hidden"] == sizes["hidden"]
    return same_width and (start["heads"], start["ffn"]) == (sizes["heads"], sizes["ffn"])


def measured_speed(report: Report, student: PrunedStudent) -> MeasuredSpeed:
    """Returns the student's speed as evaluated, or else as the shape stage measured it."""
    if measured := find_target_speed(report, student):
        share = measured["share"]
        return MeasuredSpeed(share["value"], share["low"], share["high"])
    return searched_speed(student)


def searched_speed(student: PrunedStudent) -> MeasuredSpeed:
    """Returns the student's speed as the shape stage measured it last."""
    last, target = student["measurements"][-1], student["target"]
    if target["latency_ms"]:
        return MeasuredSpeed(target["latency_ms"] / last["best_ms"])
    return MeasuredSpeed(last["speedup"] / target["speedup"])


def find_target_speed(report: Report, student: PrunedStudent) -> TargetSpeed | None:
    """Returns the evaluation of the student's requested speed; None if it wasn't evaluated."""
    entry = find_entry(report, student["name"], require_pruning(report)["conditions"]["precision"])
    return entry.get("target") if entry else None


def find_entry(report: Report, name: str, precision: str = "fp32") -> ModelEntry | None:
    """Returns a model's entry on the budget's runtime; None if there is none."""
    key = (name, require_pruning(report)["conditions"]["runtime"], precision)
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
