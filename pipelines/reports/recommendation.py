"""The student to take for each acceptable drop in score."""

from typing import NamedTuple

from pipelines.reports.formatting import format_percent, format_ratio
from pipelines.reports.headline import read_speedup
from pipelines.reports.schema import Report
from pipelines.reports.tables import ReportTable

SCORE_DROPS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)  # of the teacher's validation score


class Recommendation(NamedTuple):
    """The fastest student that loses no more than a share of the teacher's validation score."""

    score_drop: float
    name: str
    kept: float
    speedup: float


def recommend_students(report: Report) -> list[Recommendation]:
    """Returns the fastest student for each of SCORE_DROPS at which another one is; none with fewer than two students.

    Validation scores decide, so that the test scores of the report stay those of models that weren't chosen by them.
    """
    judged = {entry["name"]: entry for entry in report["models"] if "validation" in entry}
    teacher = judged.pop("teacher", None)
    if teacher is None or len(judged) < 2 or not teacher["validation"] > 0:
        return []
    recommendations: list[Recommendation] = []
    shares = {name: entry["validation"] / teacher["validation"] for name, entry in judged.items()}
    for drop in SCORE_DROPS:
        speeds = {name: read_speedup(entry) or 0.0 for name, entry in judged.items() if shares[name] >= 1 - drop}
        if speeds:
            best = max(speeds, key=lambda name: speeds[name])
            if not recommendations or recommendations[-1].name != best:
                recommendations.append(Recommendation(drop, best, shares[best], speeds[best]))
    return recommendations


def build_recommendations(report: Report) -> ReportTable | None:
    """Returns the table of recommended students; None if there is nothing to choose from."""
    recommendations = recommend_students(report)
    header = ["acceptable drop in score", "student", f"kept of the teacher's validation {report['metric']}", "speedup"]
    rows = [
        [format_percent(each.score_drop), each.name, format_percent(each.kept, 2), format_ratio(each.speedup)]
        for each in recommendations
    ]
    return ReportTable(header, rows) if rows else None


def write_recommendations(report: Report) -> list[str]:
    """Returns a sentence for each recommended student."""
    metric = report["metric"]
    return [
        f"For a drop of at most {format_percent(each.score_drop)} of the teacher's {metric}, take {each.name}: on "
        f"validation it keeps {format_percent(each.kept, 2)}, at {format_ratio(each.speedup)} the teacher's speed."
        for each in recommend_students(report)
    ]
