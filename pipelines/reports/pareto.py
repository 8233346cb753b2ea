"""Pareto charts of several students: score against speed and against size, with dominated students marked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal, cast

from pipelines.reports.charts import MUTED, SERIES, Chart, render_chart, set_log_axis, set_score_axis
from pipelines.reports.formatting import RUNTIMES, capitalize_first
from pipelines.reports.headline import read_speedup
from pipelines.reports.schema import ModelEntry, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

RUNTIME = "onnxruntime"
COLORS = {"teacher": SERIES[0], "fp32": SERIES[1], "int8": SERIES[3]}
GAP = 4  # points between a marker and its label
# Label positions: right (1) or left (-1) of the marker, on the side that the line leaves free (1) or the other (-1).
SIDES = [(1, 1), (1, 0), (0, 1), (-1, 0), (0, -1), (-1, -1), (1, -1), (-1, 1)]
DISTANCES = (1, 2, 3, 5, 7)  # multiples of 4 points, tried in this order


@dataclass(frozen=True)
class Point:
    """A model in a precision: `value` is its speedup or its size, `series` is `teacher` or the precision."""

    label: str
    series: str
    value: float
    score: float
    dominated: bool = False


def draw_pareto_charts(report: Report) -> list[Chart]:
    """Returns charts of score against speedup and against size on ONNX Runtime; none for a single student.

    Models that the teacher wasn't timed beside have no speedup.
    """
    entries = [entry for entry in report["models"] if entry["runtime"] == RUNTIME and entry["speedup"]]
    if len({entry["name"] for entry in entries} - {"teacher"}) < 2:
        return []
    metric, runtime = report["metric"], RUNTIMES[RUNTIME]
    speeds = [make_point(entry, speedup) for entry in entries if (speedup := read_speedup(entry)) is not None]
    sizes = [make_point(entry, entry["bytes"] / 1e6) for entry in entries]
    charts = (
        (f"{capitalize_first(metric)} against speedup on {runtime}", speeds, True, "times the teacher's speed in fp32"),
        (f"{capitalize_first(metric)} against size on {runtime}", sizes, False, "MB on disk"),
    )
    return [
        render_chart(
            caption, draw_front, mark_dominated(points, rising), f"{axis} (log scale)", metric, 1 if rising else -1
        )
        for caption, points, rising, axis in charts
        if points
    ]


def make_point(entry: ModelEntry, value: float) -> Point:
    """Returns the point of an entry."""
    name = entry["name"]
    series = "teacher" if name == "teacher" else entry["precision"]
    return Point(name.removeprefix("student-"), series, value, entry["score"])


def mark_dominated(points: Sequence[Point], rising: bool) -> list[Point]:
    """Returns the points with `dominated` set where another is at least as good in both values, and better in one.

    Args:
        points: The points of a chart.
        rising: Whether larger values are better.
    """

    def dominates(one: Point, other: Point) -> bool:
        a, b = ((each.value if rising else -each.value, each.score) for each in (one, other))
        return a != b and a[0] >= b[0] and a[1] >= b[1]

    return [replace(point, dominated=any(dominates(other, point) for other in points)) for point in points]


def draw_front(axes: "Axes", points: Sequence[Point], label: str, metric: str, free: int) -> Callable[[], None]:
    """Draws a line per precision, with dominated points hollow; returns a function that places the labels.

    The labels can be placed only when the axes have their final size.

    Args:
        axes: The axes to draw on.
        points: The points of the chart.
        label: Label of the x-axis.
        metric: Name of the score.
        free: 1 if lines leave room above and to the right, as falling lines do, -1 if they leave room below.
    """
    for series in dict.fromkeys(p.series for p in points):
        series_points = sorted((p for p in points if p.series == series), key=lambda p: p.value)
        color, marker = COLORS.get(series, MUTED), "*" if series == "teacher" else "o"
        size = 13 if series == "teacher" else 8
        axes.plot(
            [p.value for p in series_points], [p.score for p in series_points], color=color, linewidth=1, alpha=0.45
        )
        for p in series_points:
            fill = "none" if p.dominated else "full"
            axes.plot([p.value], [p.score], color=color, marker=marker, markersize=size, fillstyle=fill, linestyle="")
        axes.plot([], [], color=color, marker=marker, markersize=size, linestyle="", label=series)
    if any(p.dominated for p in points):
        axes.plot(
            [], [], color=MUTED, marker="o", markersize=8, fillstyle="none", linestyle="", label="dominated in both"
        )
    axes.set_xlabel(label)
    set_log_axis(axes, [p.value for p in points])
    set_score_axis(axes, metric, [p.score for p in points])
    return lambda: place_labels(axes, points, free)


def place_labels(axes: "Axes", points: Sequence[Point], free: int) -> None:
    """Writes each point's label near it, where it overlaps no marker and no other label if possible."""
    from matplotlib.transforms import Bbox

    scale = cast("Figure", axes.figure).dpi / 72  # pixels per point
    taken = []
    for p in points:
        x, y = axes.transData.transform((p.value, p.score))
        half = (7 if p.series == "teacher" else 5) * scale
        taken.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
    room = axes.get_window_extent()
    for p in points:
        tried = []
        for distance, (right, up) in product(DISTANCES, SIDES):
            text = add_label(axes, p, right, up * free, 4 * distance + (2 if right and up else GAP))
            box = text.get_window_extent()
            inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
            tried.append((sum(map(box.overlaps, taken)) + 100 * (not inside), text, box))
            if not tried[-1][0]:
                break
        _, chosen, box = min(tried, key=lambda each: each[0])
        for _, text, _ in tried:
            if text is not chosen:
                text.remove()
        taken.append(box)


def add_label(axes: "Axes", point: Point, right: int, up: int, distance: float) -> "Annotation":
    """Adds a point's label at a distance in points, to the right (1) or left (-1) and above (1) or below (-1) it."""
    across: dict[int, Literal["left", "center", "right"]] = {1: "left", 0: "center", -1: "right"}
    upright: dict[int, Literal["bottom", "center", "top"]] = {1: "bottom", 0: "center", -1: "top"}
    return axes.annotate(
        point.label,
        (point.value, point.score),
        (right * distance, up * distance),
        textcoords="offset points",
        ha=across[right],
        va=upright[up],
        fontsize=9,
        color=COLORS.get(point.series, MUTED),
        alpha=0.75 if point.dominated else 1,
    )
