"""Charts of a report as inline SVG, in the page's colors."""

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, cast

from pipelines.reports.formatting import capitalize_first, format_percent, format_runtime, format_score
from pipelines.reports.schema import LatencyEntry, ModelEntry, RangeTestEntry, Report, TrainingEntry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

Lines: TypeAlias = Mapping[str, list[tuple[float, float]]]  # name -> (step, value) pairs
LogRow: TypeAlias = Mapping[str, float]  # a row of a training log
Content = ParamSpec("Content")
# Draws on the axes; a function that it returns is called when the axes have their final position and size.
Draw: TypeAlias = "Callable[Concatenate[Axes, Content], Callable[[], None] | None]"


LatencyKey: TypeAlias = Literal["latency", "latency_batched"]


class Chart(NamedTuple):
    """A chart and its caption."""

    caption: str
    svg: str


class Marks(NamedTuple):
    """Steps to mark in a chart, by vertical lines in a style of matplotlib."""

    name: str
    steps: Sequence[int]
    style: str


MARKERS = "osD^vPX*"
_COSTS = {"cost": "remaining", "scheduled_cost": "scheduled"}  # logged while units are masked
# Placeholders for the page's colors, which depend on the light or dark scheme and which matplotlib can't write.
INK, MUTED, LINE = "#010101", "#020202", "#030303"
SERIES = ("#0a0a00", "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05")
PAGE_COLORS = {INK: "ink", MUTED: "muted", LINE: "line"} | {value: f"series-{i}" for i, value in enumerate(SERIES)}
CHART_STYLE: "dict[RcKeyType, object]" = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": LINE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def draw_speed_charts(report: Report) -> list[Chart]:
    """Returns charts of score against latency, for one text per call and for a batch."""
    charts = []
    keys: tuple[LatencyKey, ...] = ("latency", "latency_batched")
    for key in keys:
        entries = [entry for entry in report["models"] if entry[key]]
        if entries:
            batch = read_latency(entries[0], key)["batch"]
            caption = f"{capitalize_first(report['metric'])} against latency, {batch} text{'s' * (batch > 1)} per call"
            charts.append(render_chart(caption, draw_speed, entries, key, report["metric"]))
    return charts


def draw_speed(axes: "Axes", entries: Sequence[ModelEntry], key: LatencyKey, metric: str) -> None:
    """Draws each entry's score against its latencies, from the fastest call to the 90 % quantile."""
    colors = assign_colors(entry["name"] for entry in entries)
    runtimes = list(dict.fromkeys(map(format_runtime, entries)))
    latencies = [read_latency(entry, key) for entry in entries]
    curves = [[latency["best_ms"], latency["median_ms"], latency["p90_ms"]] for latency in latencies]
    for entry, times in zip(entries, curves, strict=True):
        color = SERIES[colors[entry["name"]]]
        marker = MARKERS[runtimes.index(format_runtime(entry)) % len(MARKERS)]
        axes.plot(times, [entry["score"]] * 3, color=color, marker=marker, markersize=9, markevery=[0])
        axes.plot([], [], color=color, linewidth=6, label=entry["name"])
    for name, marker in zip(runtimes, MARKERS * len(runtimes), strict=False):
        axes.plot([], [], color=MUTED, marker=marker, linestyle="", label=name)
    axes.set_xlabel("ms per call, fastest to 90 % quantile (log scale)")
    set_log_axis(axes, [times[i] for times in curves for i in (0, 2)])
    set_score_axis(axes, metric, [entry["score"] for entry in entries])


def read_latency(entry: ModelEntry, key: LatencyKey) -> LatencyEntry:
    """Returns the latency of an entry that has been timed with this batch size."""
    return cast(LatencyEntry, entry[key])


def assign_colors(names: Iterable[str]) -> dict[str, int]:
    """Returns each model's color index; the teacher's is reserved."""
    students = dict.fromkeys(name for name in names if name != "teacher")
    return {"teacher": 0} | {name: 1 + i % (len(SERIES) - 1) for i, name in enumerate(students)}


def draw_stage_charts(rows: Sequence[LogRow], metric: str, training: TrainingEntry | None = None) -> list[Chart]:
    """Returns the charts of a training log, after that of its range test if it began with one.

    They show the loss terms with the spikes that the training went back from, the learning rate with these spikes and
    its falls on a plateau, the validation score, each term's share of the gradient, the teacher's layer matched by each
    layer of the student, and the remaining cost while units are masked.
    """
    test, marks = None if training is None else training["range_test"], collect_marks(training)
    keys = dict.fromkeys(key.removeprefix("train/") for row in rows for key in row if key.startswith("train/"))
    matched = sorted((key for key in keys if re.fullmatch(r"matched_\d+", key)), key=lambda key: int(key[8:]))
    others = ("loss", "wait_share", *matched, *_COSTS)
    terms = [key for key in keys if key not in others and not key.endswith(("_weight", "_gradient_share"))]
    several = len(terms) > 1
    losses = {name: collect_points(rows, f"train/{name}") for name in (terms if len(terms) == 1 else ["loss", *terms])}
    shares = {name: collect_points(rows, f"train/{name}_gradient_share") for name in terms if several}
    layers = {f"student's {key[8:]}": collect_points(rows, f"train/{key}") for key in matched}
    costs = {name: collect_points(rows, f"train/{key}") for key, name in _COSTS.items()}
    rates = collect_points(rows, "lr")
    charts: list[tuple[str, Lines, Callable[[Axes, Lines, Mapping[str, str]], None]]] = [
        ("Training loss" + " and its unweighted terms" * several, losses, partial(draw_marked, marks=marks[:1])),
        ("Learning rate", {"rate": rates if len(rates) > 1 else []}, partial(draw_marked, marks=marks)),
        (f"Validation {metric}", {metric: collect_points(rows, "val/score")}, draw_scores),
        ("Share of the gradient", shares, draw_shares),
        ("Teacher layer matched by each student layer", layers, draw_layers),
        ("Cost of the unmasked units, as a share of the unpruned model's", costs, draw_shares),
    ]
    colors = {"loss": INK} | {term: SERIES[(i + 2) % len(SERIES)] for i, term in enumerate(terms)}
    colors |= {name: SERIES[i % len(SERIES)] for i, name in enumerate([*layers, *costs])}
    first = [] if test is None else [render_chart("Range test of the learning rate", draw_range_test, test)]
    return first + [
        render_chart(caption, draw, lines, colors) for caption, lines, draw in charts if any(lines.values())
    ]


def collect_marks(training: TrainingEntry | None) -> list[Marks]:
    """Returns the steps of a training's spikes, and those in which its learning rate fell on a plateau."""
    spikes = () if training is None else training["spikes"]
    falls = () if training is None else training["falls"]
    return [
        Marks("spike", [spike["step"] for spike in spikes], ":"),
        Marks("plateau", [fall["step"] for fall in falls], "--"),
    ]


def collect_points(rows: Sequence[LogRow], key: str) -> list[tuple[float, float]]:
    """Returns (step, value) of the rows with a finite value, in the order of the steps."""
    points = [(float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]
    return sorted(point for point in points if math.isfinite(point[1]))


def draw_lines(axes: "Axes", lines: Lines, colors: Mapping[str, str], marker: str = "") -> None:
    """Draws values over steps."""
    for name, line in lines.items():
        steps, values = [step for step, _ in line], [value for _, value in line]
        axes.plot(steps, values, color=colors.get(name, SERIES[1]), marker=marker, label=name)
    axes.set_xlabel("step")


def draw_marked(axes: "Axes", lines: Lines, colors: Mapping[str, str], marks: Sequence[Marks]) -> None:
    """Draws values over steps, with a vertical line in each marked step."""
    draw_lines(axes, lines, colors)
    for mark in marks:
        for number, step in enumerate(mark.steps):
            label = "_" if number else mark.name  # one entry in the legend
            axes.axvline(step, color=MUTED, linestyle=mark.style, label=label)


def draw_range_test(axes: "Axes", test: RangeTestEntry) -> None:
    """Draws the smoothed loss at each learning rate of a range test, and marks the chosen one."""
    axes.plot(test["rates"], test["losses"], color=SERIES[1], label="smoothed loss")
    axes.axvline(test["chosen"], color=MUTED, linestyle="--", label=f"chosen: {test['chosen']:.2g}")
    axes.set_xlabel("learning rate (log scale)")
    set_log_axis(axes, [*test["rates"], test["chosen"]])


def draw_scores(axes: "Axes", lines: Lines, colors: Mapping[str, str]) -> None:
    """Draws scores over steps, with a marker for each validation."""
    draw_lines(axes, lines, colors, marker="o")
    for metric, line in lines.items():
        set_score_axis(axes, metric, [value for _, value in line])


def draw_shares(axes: "Axes", lines: Lines, colors: Mapping[str, str]) -> None:
    """Draws shares over steps, in percent from 0 to 100."""
    draw_lines(axes, lines, colors)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: format_percent(value, 0))


def draw_layers(axes: "Axes", lines: Lines, colors: Mapping[str, str]) -> None:
    """Draws step functions, because a layer is either matched or not."""
    for name, line in lines.items():
        steps, layers = [step for step, _ in line], [layer for _, layer in line]
        axes.plot(steps, layers, color=colors[name], drawstyle="steps-post", label=name)
    highest = max(layer for line in lines.values() for _, layer in line)
    axes.set_yticks(range(1, int(highest) + 1))
    axes.set_xlabel("step")
    axes.set_ylabel("layer")


def set_score_axis(axes: "Axes", metric: str, scores: Sequence[float]) -> None:
    """Sets a score axis of at least two percentage points, so that noise doesn't look like a difference.

    Undefined scores, such as a correlation with a constant, are NaN and ignored.
    """
    finite = [score for score in scores if math.isfinite(score)] or [0.0]
    middle, half = (max(finite) + min(finite)) / 2, max((max(finite) - min(finite)) * 0.6, 0.01)
    axes.set_ylim(middle - half, middle + half)
    axes.set_ylabel(metric)
    axes.yaxis.set_major_formatter(lambda value, _: format_score(value, metric, 1))


def set_log_axis(axes: "Axes", values: Sequence[float]) -> None:
    """Sets a log x-axis with round ticks; matplotlib's are powers of ten, and most charts span less than one."""
    low, high = min(values) / 1.3, max(values) * 1.3
    steps = (1, 1.5, 2, 3, 5, 7) if high < 8 * low else (1, 2, 5) if high < 100 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    axes.set_xscale("log")
    axes.set_xticks([step * 10.0**power for power in powers for step in steps])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def render_chart(caption: str, draw: "Draw[Content]", *content: Content.args, **more_content: Content.kwargs) -> Chart:
    """Returns an inline SVG of `draw(axes, *content)` in the page's colors, as wide as its container."""
    file = io.StringIO()
    with draw_figure(caption, draw, *content, **more_content) as figure:
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    svg = file.getvalue()
    for color, name in PAGE_COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # ids would repeat in every chart
    label = f'role="img" aria-label="{html.escape(caption)}"'
    return Chart(caption, re.sub(r'width="[^"]*" height="[^"]*"', label, svg, count=1))


def make_standalone(svg: str) -> str:
    """Returns the chart as a standalone SVG file that includes its colors for light and dark schemes."""
    palette = (Path(__file__).parent / "palette.css").read_text("utf-8")
    style = f"<style>\n{palette}text {{ font-family: system-ui, sans-serif !important; }}\n</style>"
    end = svg.index(">") + 1
    return f"{svg[:end]}{style}{svg[end:]}"


@contextmanager
def draw_figure(
    caption: str, draw: "Draw[Content]", *content: Content.args, **more_content: Content.kwargs
) -> "Iterator[Figure]":
    """Yields the matplotlib figure of a chart, with its legend."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(CHART_STYLE | {"svg.hashsalt": caption}):
        figure = Figure(figsize=(4.8, 3.2), layout="constrained")
        axes = figure.add_subplot()
        finish = draw(axes, *content, **more_content)
        handles, labels = axes.get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))
        if len(legend) > 1:
            columns = min(max(50 // max(map(len, legend)), 1), 4)  # a legend wider than the chart would be clipped
            figure.legend(
                legend.values(), legend, loc="outside upper left", ncols=columns,
                columnspacing=1.0, fontsize=10, frameon=False, handlelength=0.8,
            )  # fmt: skip
        if finish is not None:
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            finish()
        yield figure
