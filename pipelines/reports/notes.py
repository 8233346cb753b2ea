"""Sentences of a report on its scores and on how its figures were measured."""

import math

from pipelines.reports.formatting import (
    capitalize_first,
    format_direction,
    format_enumeration,
    format_metric,
    format_quantity,
    format_score,
)
from pipelines.reports.headline import headline_entry
from pipelines.reports.schema import ModelEntry, Report
from pipelines.reports.wording import WORDING, describe_parity


def write_score_notes(report: Report) -> list[str]:
    """Returns an explanation of each score, and whether higher or lower is better."""
    explanations = WORDING[report["task"]].scores
    names = dict.fromkeys(name for entry in report["models"] for name in entry.get("scores", {}))
    notes = [
        f"{capitalize_first(name)}: {explanations[name]}; {format_direction(name)}."
        for name in names
        if name in explanations
    ]
    agreements = {entry["name"]: entry["agreement_with_teacher"] for entry in report["models"] if entry["speedup"]}
    if incomparable := [name for name, agreement in agreements.items() if agreement is None]:
        notes.append(
            f"The scores of {format_enumeration(incomparable)} are on other tokens than the teacher's, because the "
            "tokenizers differ."
        )
    return notes


def write_measurement_notes(report: Report) -> list[str]:
    """Returns sentences on how the figures were measured."""
    entry, wording = headline_entry(report), WORDING[report["task"]]
    notes = [*_write_test_notes(report, entry), _write_latency_note(report, entry)]
    if entry["speedup"]:
        notes.append("A speedup is the teacher's latency divided by the model's, where both were timed in turn.")
    if entry["agreement_with_teacher"] is not None:
        compared = wording.agreement
        notes.append(
            f"Agreement is the share of the {compared.items} for which model and teacher give the same "
            f"{compared.decision}."
        )
    notes += [describe_parity(each, each["parity"], wording.parity) for each in report["models"] if each["parity"]]
    return notes + [
        f"{each['stage']}: {each['target']} failed its verification and was moved to {each['where']}: {each['reason']}."
        for each in report.get("rejected", [])
    ]


def _write_test_notes(report: Report, entry: ModelEntry) -> list[str]:
    metric, count = report["metric"], report["data"]["test"]
    rows, score = format_quantity(count, WORDING[report["task"]].rows), format_score(entry["score"], metric)
    notes = [f"{capitalize_first(format_metric(metric))} is measured on the {rows} of the test split."]
    if report["task"] == "text-classification" and count:
        error = math.sqrt(entry["score"] * (1 - entry["score"]) / count) * 100
        notes.append(
            f"The standard error of an accuracy of {score} on {count:,} texts is {error:.2f} percentage points."
        )
    if report["config"].get("fit_class_biases"):
        notes.append(
            "Biases of the classes were fitted to the validation split after the training, in the teacher as in the "
            "students; validation scores are on the rows that they were fitted to."
        )
    if "baseline" in report:
        baseline = report["baseline"]
        name = capitalize_first(baseline["name"])
        notes.append(f"{name}: the score of predicting {baseline['answer']} for each of the {rows}.")
    return notes


def _write_latency_note(report: Report, entry: ModelEntry) -> str:
    latency, processor = entry["latency"], report["machine"]["processor"]
    calls = f"{latency['repeats']:,} calls"
    return (
        f"Latency is the median of per-text minima over {calls} in this run "
        f"({processor}, threads: {latency['threads']}) on texts of about {latency['length']} tokens. All models "
        "alternate on the same blocks of texts. Other load on the machine can only make calls slower, so the charts "
        "extend to the 90 % quantile of all calls. Tokenization is not included."
    )
