"""The table and verdicts of a pruning run: each stage's effect on every student, and whether targets were met."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipelines.reports.numbers import (
    CORRELATIONS,
    LOWER,
    RUNTIMES,
    Report,
    Row,
    count_text,
    listed,
    percent_text,
    score_text,
    times_text,
)
from pipelines.reports.wording import validated_text

Table = list[tuple[str, list[tuple[str, list[str]]]]]  # (stage, rows) pairs; a row is a label and a cell for each model
NONE = "–"


def pruning_table(report: Report) -> tuple[list[str], Table]:
    """Returns the header and the rows of each stage in order: the teacher's column first, then one per student."""
    road, metric, validated = report["road"], report["metric"], f"validation {validated_text(report)}"
    start, students, teacher = road["start"], road["students"], entry_of(report, "teacher")
    whole, own = start["outline"], start["student"] == "teacher"

    def row(label: str, first: str, cells: Iterable[str]) -> tuple[str, list[str]]:
        return label, [first, *cells]

    def units(label: str, count: Any) -> tuple[str, list[str]]:
        full = count(whole)
        cells = [f"{count(each['outline']):,} of {full:,}" if full else NONE for each in students]
        return row(label, f"{full:,}" if own and full else NONE, cells)

    gone = 4 * (teacher["params"] - start["params"]) / 1e6 if teacher and own else None
    before = [
        row("words", f"{road['teacher']['words']:,}", [f"{start['words']:,}"] * len(students)),
        row("fp32 weights that go", NONE, [NONE if gone is None else f"{gone:.1f} MB"] * len(students)),
    ]
    cut = [
        units("layers", lambda outline: len(outline["heads"])),
        units("width", lambda outline: outline["hidden"]),
        units("heads", lambda outline: sum(outline["heads"])),
        units("neurons", lambda outline: sum(outline["ffn"])),
        row(
            "parameters",
            count_text(teacher["params"]) if teacher else NONE,
            (count_text(s["params"]) for s in students),
        ),
        row("speed-up predicted", NONE, (times_text(each["predicted_speedup"]) for each in students)),
        row("speed-up measured", NONE, (times_text(each["measurements"][-1]["by_all"]) for each in students)),
        row("shapes tried", NONE, (str(len(each["trials"])) for each in students)),
        row("KL after the trials", NONE, map(trial_text, students)),
    ]
    scores = [each["teacher_score"] for each in students]
    trained = [
        row(validated, score_or_none(scores[0], metric), (score_text(s["score"], metric) for s in students)),
        row("of the teacher's", NONE, (percent_text(kept(each)) for each in students)),
        score_row(report, "fp32"),
    ]
    stages = [("start: words removed", before), ("shape: units removed", cut), ("trained", trained)]
    for bits in dict.fromkeys(entry["precision"] for entry in report["models"] if entry["precision"] != "fp32"):
        stages.append((bits, [*rounding_rows(report, bits), score_row(report, bits), lost_row(report, bits)]))
    asked = [
        row("asked", NONE, (asked_text(each["target"]) for each in students)),
        row("met", NONE, (met_text(each["target"], measured_speed(report, each)) for each in students)),
        bytes_row(report),
    ]
    return ["teacher", *(each["name"] for each in students)], [*stages, ("target", asked)]


def entry_of(report: Report, name: str, precision: str = "fp32") -> Row | None:
    """Returns a model's entry on the budget's runtime; None if there is none."""
    runtime = report["road"]["conditions"]["runtime"]
    found = (e for e in report["models"] if (e["name"], e["runtime"], e["precision"]) == (name, runtime, precision))
    return next(found, None)


def entries_of(report: Report, precision: str) -> list[Row | None]:
    """Returns the entries of the teacher and the students on the budget's runtime."""
    names = ["teacher", *(each["name"] for each in report["road"]["students"])]
    return [entry_of(report, name, precision) for name in names]


def score_row(report: Report, precision: str) -> tuple[str, list[str]]:
    """Returns the row of test scores in a precision."""
    metric = report["metric"]
    cells = [score_or_none(entry["score"] if entry else None, metric) for entry in entries_of(report, precision)]
    return f"test {metric}, {precision}", cells


def rounding_rows(report: Report, bits: str) -> list[tuple[str, list[str]]]:
    """Returns rows with the validation scores after calibration and after quantization-aware training."""
    told = [each.get("quantized") or {} for each in report["road"]["students"]]
    if not any(each.get("precision") == bits for each in told):
        return []
    metric, validated = report["metric"], f"validation {validated_text(report)}"
    return [
        (f"{validated}, {how}", [NONE, *(score_or_none(each.get(key), metric) for each in told)])
        for key, how in (("calibrated", "calibrated"), ("score", "trained in few bits"))
    ]


def lost_row(report: Report, bits: str) -> tuple[str, list[str]]:
    """Returns the row of score changes by quantization, in percentage points if the score is a share."""
    cells = []
    for whole, rounded in zip(entries_of(report, "fp32"), entries_of(report, bits), strict=True):
        if whole is None or rounded is None:
            cells.append(NONE)
        else:
            change = rounded["score"] - whole["score"]
            share = report["metric"] not in CORRELATIONS | LOWER
            cells.append(f"{change * 100:+.2f} points" if share else f"{change:+.4f}")
    return f"change by {bits}", cells


def bytes_row(report: Report) -> tuple[str, list[str]]:
    """Returns the row of sizes on disk, in the budget's precision."""
    precision = report["road"]["conditions"]["precision"]
    teacher, *students = entries_of(report, "fp32")[:1] + entries_of(report, precision)[1:]
    cells = [f"{entry['bytes'] / 1e6:.1f} MB" if entry else NONE for entry in (teacher, *students)]
    return f"on disk, {precision}" if precision == "fp32" else f"on disk (teacher fp32, students {precision})", cells


def score_or_none(score: float | None, metric: str) -> str:
    return NONE if score is None else score_text(score, metric)


def trial_text(student: Mapping[str, Any]) -> str:
    """Returns the final divergence of the shape that won the trials."""
    best = winner(student["trials"])
    return NONE if best is None else f"{student['trials'][best]['divergences'][-1]:.3f}"


def winner(trials: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns the index of the best trial among those that ran longest; None if nothing was trained."""
    ranked = [
        (-len(each["divergences"]), each["divergences"][-1], i) for i, each in enumerate(trials) if each["divergences"]
    ]
    return min(ranked)[2] if ranked else None


def kept(student: Mapping[str, Any]) -> float | None:
    """Returns the share of the teacher's validation score that the student's weights keep."""
    return student["score"] / student["teacher_score"] if student["teacher_score"] else None


def shares_kept(models: Iterable[Row]) -> dict[str, float]:
    """Returns student -> share of the teacher's validation score that its deployed file keeps, where measured."""
    found = {entry["name"]: entry["validation"] for entry in models if "validation" in entry}
    teacher = found.pop("teacher", None)
    return {name: score / teacher for name, score in found.items()} if teacher else {}


def judged(report: Report, student: Mapping[str, Any]) -> float | None:
    """Returns the share compared with the required score: of the deployed file, or else of the trained weights."""
    return shares_kept(report["models"]).get(student["name"], kept(student))


def measured_speed(report: Report, student: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (speed-up, milliseconds) of the student under the budget's conditions.

    They are taken from the evaluation, or from the shape stage if the evaluation's conditions differ.
    """
    last = student["measurements"][-1]
    return evaluated(report, student) or (last["speedup"], last["best_ms"])


def evaluated(report: Report, student: Mapping[str, Any]) -> tuple[float, float] | None:
    """Returns `measured_speed` from the evaluation; None if it wasn't measured under the budget's conditions."""
    wanted = report["road"]["conditions"]
    entry = entry_of(report, student["name"], wanted["precision"])
    for latency, speedup in (("latency", "speedup"), ("latency_batched", "speedup_batched")):
        ratios = entry.get(speedup) if entry else None
        if entry and ratios and ratios["vs_teacher_same_runtime"] and evaluated_alike(wanted, entry[latency]):
            return entry[speedup]["vs_teacher_same_runtime"], entry[latency]["best_ms"]
    return None


def evaluated_alike(wanted: Mapping[str, Any], took: Mapping[str, Any]) -> bool:
    """Returns whether a latency was measured under the budget's conditions."""
    return not wanted["length"] and all(wanted[name] == took[name] for name in ("batch", "threads"))


def asked_text(target: Mapping[str, Any]) -> str:
    return f"{target['latency_ms']:g} ms" if target["latency_ms"] else f"{target['speedup']:g}×"


def met_text(target: Mapping[str, Any], figures: tuple[float, float]) -> str:
    short = shortfall(target, figures)
    value = f"{figures[1]:.2f} ms" if target["latency_ms"] else times_text(figures[0])
    return value if short <= 0 else f"{value}, missed by {percent_text(short)}"


def shortfall(target: Mapping[str, Any], figures: tuple[float, float]) -> float:
    """Returns the relative shortfall of the speed met against the requested speed; at most 0 if it is met."""
    speedup, milliseconds = figures
    return 1 - (target["latency_ms"] / milliseconds if target["latency_ms"] else speedup / target["speedup"])


def verdicts(report: Report) -> list[tuple[bool, str]]:
    """Returns (whether it was met, sentence) for each target and for the required score."""
    said = []
    least = report["config"].get("budget", {}).get("min_score", 0)
    for each in report["road"]["students"]:
        name, target, figures, share = each["name"], each["target"], measured_speed(report, each), judged(report, each)
        good = shortfall(target, figures) <= 0
        said.append((good, f"{name}: {asked_text(target)} asked, {met_text(target, figures)}{' met' * good}."))
        if least and share is not None:
            asked = f"at least {percent_text(least)} of the teacher's validation {report['metric']} asked"
            missed = ": missed" * (share < least)
            said.append((share >= least, f"{name}: {asked}, {percent_text(share, 2)} kept{missed}."))
    return said


def pruning_notes(report: Report) -> list[str]:
    """Returns sentences on how the table's figures were measured."""
    road = report["road"]
    wanted = road["conditions"]
    length = f"{wanted['length']} tokens each" if wanted["length"] else "of the data set's own lengths"
    where, several = RUNTIMES.get(wanted["runtime"], wanted["runtime"]), "s" * (wanted["batch"] > 1)
    alike = evaluated(report, road["students"][0])
    texts = "the texts of the evaluation" if alike else "validation texts, when the shape was chosen"
    notes = [
        f"A target's speed-up is the teacher's time in fp32 divided by the student's in {wanted['precision']} on "
        f"{where}: {wanted['batch']} text{several} a call, {length}, threads: {wanted['threads']}. What was met was "
        f"measured on {texts}.",
        "Predicted is what the fitted costs of the parts add up to; measured is the shape before its training.",
        "KL is the divergence from the teacher on the validation split after the short trainings that the shapes are "
        "chosen by; the shape that won may then have lost or gained units until the speed was met.",
    ]
    if any(each["teacher_score"] for each in road["students"]):
        notes.append(
            "Validation scores are those of the trained weights in fp32; the least score that was asked for is judged "
            "on the files that are deployed."
        )
    return notes


def shape_text(report: Report, name: str) -> str | None:
    """Returns a pruned student's sizes as a phrase; None if it wasn't pruned."""
    found = next((s for s in (report.get("road") or {}).get("students", []) if s["name"] == name), None)
    if found is None:
        return None
    heads, ffn, width = found["outline"]["heads"], found["outline"]["ffn"], found["outline"]["hidden"]
    return (
        f"{len(heads)} layer{'s' * (len(heads) > 1)}{f' of width {width}' if width else ''} with "
        f"{sizes_text(heads)} attention heads and "
        f"{sizes_text(ffn)} feed-forward neurons"
    )


def sizes_text(counts: Sequence[int]) -> str:
    """Returns the counts of all layers; a single number if all are equal."""
    texts = [f"{count:,}" for count in counts]
    return listed(texts if len(set(texts)) > 1 else texts[:1])
