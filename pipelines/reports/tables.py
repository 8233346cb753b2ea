"""The tables of a report: a summary of all models, and their scores."""

import math
from typing import NamedTuple

from pipelines.reports.formatting import (
    LOWER_IS_BETTER,
    NO_VALUE,
    format_count,
    format_direction,
    format_ms,
    format_percent,
    format_ratio,
    format_runtime,
    format_score,
)
from pipelines.reports.headline import read_speedup
from pipelines.reports.schema import BaselineEntry, Results


class ReportTable(NamedTuple):
    """A header, and rows with a cell for each of its names."""

    header: list[str]
    rows: list[list[str]]


def build_summary(results: Results) -> ReportTable:
    """Returns the table of all models; speedups are over the teacher on the same runtime."""
    metric = results["metric"]
    header = ["model", "runtime", metric, "params", "size in MB", "ms, batch 1", "speedup", "agreement"]
    rows = [
        [
            entry["name"],
            format_runtime(entry),
            format_score(entry["score"], metric),
            format_count(entry["params"]),
            f"{entry['bytes'] / 1e6:.1f}",
            format_ms(entry["latency"]["best_ms"]),
            format_ratio(read_speedup(entry)),
            format_percent(entry["agreement_with_teacher"]),
        ]
        for entry in results["models"]
    ]
    if "baseline" in results:
        baseline = results["baseline"]
        dashes = [NO_VALUE] * (len(header) - 3)
        rows.append([baseline["name"], NO_VALUE, _format_baseline(baseline, metric), *dashes])
    return ReportTable(header, rows)


def build_scores(results: Results) -> ReportTable | None:
    """Returns the table of all scores, the teacher's first; None if the task has a single score."""
    entries = sorted(results["models"], key=lambda entry: entry["name"] != "teacher")
    names = list(dict.fromkeys(name for entry in entries for name in entry.get("scores", {})))
    if len(names) < 2:
        return None
    columns = [f"{name} ({format_direction(name)})" if name in LOWER_IS_BETTER else name for name in names]
    rows = [
        [
            entry["name"],
            format_runtime(entry),
            *(format_score(entry.get("scores", {}).get(name, math.nan), name) for name in names),
        ]
        for entry in entries
    ]
    if "baseline" in results:
        baseline = results["baseline"]
        rows.append([baseline["name"], NO_VALUE, *(_format_baseline(baseline, name) for name in names)])
    return ReportTable(["model", "runtime", *columns], rows)


def _format_baseline(baseline: BaselineEntry, metric: str) -> str:
    """Returns one of the scores that the baseline reaches without a model."""
    score = baseline["scores"].get(metric)
    return NO_VALUE if score is None else format_score(score, metric)
