"""The table of a cascade beside its students, and the sentences that compare them."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.reports.formatting import NO_VALUE, format_percent, format_score
from pipelines.reports.tables import ReportTable

SAME_LATENCY = 0.1  # largest relative difference of mean latencies that count as equal


def build_cascade_table(metric: str, models: Sequence[Mapping[str, Any]]) -> ReportTable:
    """Returns the table of the cascade, which comes first, and of each model alone."""
    header = ["model", metric, "texts answered", "ms, mean", "ms, 95th percentile", "size in MB"]
    shares = models[0]["shares"]
    rows = [
        [
            entry["name"],
            format_score(entry["score"], metric),
            format_percent(shares[entry["name"]]) if entry["name"] in shares else NO_VALUE,
            f"{entry['mean_ms']:.3f}",
            f"{entry['p95_ms']:.3f}",
            f"{entry['bytes'] / 1e6:.1f}",
        ]
        for entry in models
    ]
    return ReportTable(header, rows)


def describe_cascade_result(metric: str, models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns sentences: which members answer, and how a single model of the same mean latency compares."""
    cascade, *others = models
    members = list(cascade["shares"])
    if len(members) == 1:
        return [f"{members[0]} alone is the best choice: handing texts to another student gains nothing"]
    shares = ", ".join(f"{name} {format_percent(share)}" for name, share in cascade["shares"].items())
    lines = [f"share of the test split's texts that each answers: {shares}"]
    near = [each for each in others if abs(each["mean_ms"] / cascade["mean_ms"] - 1) <= SAME_LATENCY]
    if not near:
        return [*lines, f"no single model's mean latency is within {SAME_LATENCY:.0%} of the cascade's"]
    single = min(near, key=lambda each: abs(each["mean_ms"] - cascade["mean_ms"]))
    gain = 100 * (cascade["score"] - single["score"])
    return [
        *lines,
        f"{single['name']} has about the same mean latency; the cascade's {metric} is {abs(gain):.2f} points "
        f"{'higher' if gain >= 0 else 'lower'}",
    ]
