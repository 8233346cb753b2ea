"""Which student to take for a loss of score that is acceptable."""

from typing import NamedTuple

from pipelines.reports.formatting import format_percent, format_ratio
from pipelines.reports.headline import read_speedup
from pipelines.reports.schema import Report
from pipelines.reports.tables import ReportTable

LOSSES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)  # of the teacher's validation score


class Recommendation(NamedTuple):
    """The fastest student that loses no more than a share of the teacher's validation score."""

    loss: float
    name: str
    kept: float
    speedup: float


def recommend_students(report: Report) -> list[Recommendation]:
    """Returns the fastest student for each of LOSSES at which another one is; none with fewer than two students.

    Validation scores decide, so that the test scores of the report stay those of models that weren't chosen by them.
    """
    judged = {entry["name"]: entry for entry in report["models"] if "validation" in entry}
    teacher = judged.pop("teacher", None)
    if teacher is None or len(judged) < 2 or not teacher["validation"] > 0:
        return []
    recommendations: list[Recommendation] = []
    for loss in LOSSES:
        shares = {name: entry["validation"] / teacher["validation"] for name, entry in judged.items()}
        speeds = {name: read_speedup(entry) or 0.0 for name, entry in judged.items() if shares[name] >= 1 - loss}
        if speeds:
            best = max(speeds, key=lambda name: speeds[name])
            if not recommendations or recommendations[-1].name != best:
                recommendations.append(Recommendation(loss, best, shares[best], speeds[best]))
    return recommendations


def build_recommendations(report: Report) -> ReportTable | None:
    """Returns the table of recommended students; None if there is nothing to choose from."""
    recommendations = recommend_students(report)
    header = ["acceptable loss", "student", f"kept of the teacher's validation {report['metric']}", "speedup"]
    rows = [
        [format_percent(each.loss), each.name, format_percent(each.kept, 2), format_ratio(each.speedup)]
        for each in recommendations
    ]
    return ReportTable(header, rows) if rows else None


def write_recommendations(report: Report) -> list[str]:
    """Returns a sentence for each recommended student."""
    metric = report["metric"]
    return [
        f"To lose at most {format_percent(each.loss)} of the teacher's {metric}, take {each.name}: on validation it "
        f"keeps {format_percent(each.kept, 2)}, at {format_ratio(each.speedup)} the teacher's speed."
        for each in recommend_students(report)
    ]
