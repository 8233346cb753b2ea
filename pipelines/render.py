"""Turns a finished report into what people read: a page, a model card, a table for the terminal."""

import html
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
Row = Mapping[str, Any]
Lines = Mapping[str, list[tuple[float, float]]]

RUNTIMES = {"pytorch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "executorch": "ExecuTorch"}
MARKERS = "osD^vPX*"
# matplotlib writes plain colours; these stand for the page's own, which follow the reader's light or dark scheme.
INK, MUTED, LINE = "#010101", "#020202", "#030303"
SERIES = ("#0a0a00", "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05")
PAGE_COLOURS = {INK: "ink", MUTED: "muted", LINE: "line"} | {value: f"series-{i}" for i, value in enumerate(SERIES)}
CHART_STYLE: dict[Any, Any] = {
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


def render_html(report: dict[str, Any], curves: dict[str, list[dict[str, Any]]]) -> str:
    """The report as one page that needs no other file and asks for none.

    Args:
        report: The finished report.
        curves: Stage -> the rows of its training log.
    """
    return template("report.html.jinja").render(
        report=report,
        headline=headline(report),
        best=shown(report),
        teacher=teacher_of(report, shown(report)),
        summary=summary_rows(report),
        measured=measured(report),
        speed_charts=speed_charts(report),
        stage_charts={stage: stage_charts(rows, report["metric"]) for stage, rows in curves.items()},
        config=json.dumps(report["config"], indent=2, default=str, ensure_ascii=False),
    )


def render_card(report: dict[str, Any]) -> str:
    """The Hugging Face model card of the student: a README.md with its front matter."""
    folders = {entry["runtime"]: entry["path"].removesuffix("/model.onnx") for entry in reversed(students(report))}
    return template("card.md.jinja").render(
        report=report,
        headline=headline(report),
        teacher=teacher_of(report, shown(report)),
        summary=summary_rows(report),
        measured=measured(report),
        max_length=report["config"].get("data", {}).get("max_length"),
        folders=folders,
    )


def summary_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table at the end of a run; the speedup is against the teacher on the same runtime."""
    header = ["model", "runtime", report["metric"], "params", "size in MB", "ms, batch 1", "speedup", "agreement"]
    rows = [
        [
            entry["name"],
            runtime_text(entry),
            score_text(entry["score"], report["metric"]),
            count_text(entry["params"]),
            f"{entry['bytes'] / 1e6:.1f}",
            ms_text(entry["latency"]["median_ms"]),
            times_text((entry["speedup"] or {}).get("vs_teacher_same_runtime")),
            percent_text(entry["agreement_with_teacher"]),
        ]
        for entry in report["models"]
    ]
    return header, rows


def students(report: Report) -> Sequence[Row]:
    return [entry for entry in report["models"] if entry["name"] != "teacher"] or report["models"]


def shown(report: Report) -> Row:
    """The entry that stands for the result: the student where it answers one text fastest."""
    return min(students(report), key=lambda entry: entry["latency"]["median_ms"])


def teacher_of(report: Report, entry: Row) -> Row | None:
    """The teacher's entry to compare with: of the same runtime and precision as far as there is one."""
    teachers = [other for other in report["models"] if other["name"] == "teacher" and other is not entry]
    keys = ("runtime", "precision")
    return min(teachers, key=lambda other: [other[key] != entry[key] for key in keys], default=None)


def headline(report: Report) -> str:
    """The result in one sentence."""
    entry, metric = shown(report), report["metric"]
    teacher, speedup = teacher_of(report, entry), (entry["speedup"] or {}).get("vs_teacher_same_runtime")
    took = f"{ms_text(entry['latency']['median_ms'])} ms a text on {runtime_text(entry)}"
    if teacher is None or not teacher["score"]:  # a teacher that was hardly trained can score 0
        return f"The {entry['name']} reaches {score_text(entry['score'], metric)} {metric} in {took}."
    kept = f"The {entry['name']} keeps {percent_text(entry['score'] / teacher['score'])} of the teacher's {metric}"
    if speedup is None:
        return f"{kept} and takes {took}."
    return f"{kept} at {times_text(speedup)} its speed on {runtime_text(entry)}."


def measured(report: Report) -> list[str]:
    """How the figures were taken."""
    entry, metric, test = shown(report), report["metric"], report["data"]["test"]
    took, score = entry["latency"], score_text(entry["score"], metric)
    said = [f"{metric.capitalize()} is taken on the {test:,} texts of the test split."]
    if metric == "accuracy" and test:
        error = math.sqrt(entry["score"] * (1 - entry["score"]) / test)
        said.append(f"The standard error of an accuracy of {score} on {test:,} texts is {error * 100:.2f} points.")
    said.append(
        f"Latency is the median of {took['repeats']:,} calls in this run ({report['machine']['processor']}, threads: "
        f"{took['threads']}) on texts of about {took['length']} tokens, all models in turn on the same texts; "
        "p10 and p90 are the spread. Tokenization is not counted."
    )
    if entry["speedup"]:
        said.append("A speedup is the teacher's median time divided by the model's.")
    if entry["agreement_with_teacher"] is not None:
        said.append("Agreement is the share of the test texts that get the same class from the model and the teacher.")
    return said + [parity_text(other) for other in report["models"] if other["parity"]]


def parity_text(entry: Row) -> str:
    parity = entry["parity"]
    return (
        f"The {entry['name']} on {runtime_text(entry)}, loaded in a fresh process, was compared with the trained model "
        f"on {parity['texts']:,} texts: the logits differ by {parity['max_difference']:.1e} at most, "
        f"{percent_text(parity['same_class'])} of the classes are the same."
    )


def speed_charts(report: Report) -> list[tuple[str, str]]:
    """Score against latency, for one text a call and for a batch: (caption, SVG) each."""
    charts = []
    for key in ("latency", "latency_batched"):
        if entries := [entry for entry in report["models"] if entry.get(key)]:
            batch = entries[0][key]["batch"]
            caption = f"{report['metric'].capitalize()} against latency, {batch} text{'s' * (batch > 1)} a call"
            charts.append((caption, chart(caption, draw_speed, entries, key, report["metric"])))
    return charts


def draw_speed(axes: Any, entries: Sequence[Row], key: str, metric: str) -> None:
    names = list(dict.fromkeys(["teacher", "student", *(entry["name"] for entry in entries)]))
    runtimes = list(dict.fromkeys(map(runtime_text, entries)))
    for entry in entries:
        times, score = [entry[key][q] for q in ("p10_ms", "median_ms", "p90_ms")], entry["score"]
        colour = SERIES[names.index(entry["name"]) % len(SERIES)]
        marker = MARKERS[runtimes.index(runtime_text(entry)) % len(MARKERS)]
        axes.plot(times, [score] * 3, color=colour, marker=marker, markersize=9, markevery=[1])
        axes.plot([], [], color=colour, linewidth=6, label=entry["name"])
    for name, marker in zip(runtimes, MARKERS * len(runtimes), strict=False):
        axes.plot([], [], color=MUTED, marker=marker, linestyle="", label=name)
    axes.set_xlabel("ms a call (median, p10 to p90; log scale)")
    log_axis(axes, [entry[key][q] for entry in entries for q in ("p10_ms", "p90_ms")])
    score_axis(axes, metric, [entry["score"] for entry in entries])


def stage_charts(rows: Sequence[Row], metric: str) -> list[tuple[str, str]]:
    """What a training log holds, as (caption, SVG) each: loss terms, score, and which term pulls how hard."""
    keys = dict.fromkeys(key.removeprefix("train/") for row in rows for key in row if key.startswith("train/"))
    terms = [key for key in keys if key != "loss" and not key.endswith(("_weight", "_gradient_share"))]
    several = len(terms) > 1
    losses = {name: points(rows, f"train/{name}") for name in (terms if len(terms) == 1 else ["loss", *terms])}
    shares = {name: points(rows, f"train/{name}_gradient_share") for name in terms if several}
    wanted: list[tuple[str, Lines, Callable[..., None]]] = [
        ("Training loss" + " and its unweighted terms" * several, losses, draw_lines),
        (f"Validation {metric}", {metric: points(rows, "val/score")}, draw_score),
        ("Share of the gradient", shares, draw_shares),
    ]
    colours = {"loss": INK} | {term: SERIES[(i + 2) % len(SERIES)] for i, term in enumerate(terms)}
    return [(caption, chart(caption, draw, lines, colours)) for caption, lines, draw in wanted if any(lines.values())]


def points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that logged a finite value, in the order of the steps."""
    found = [(float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]
    return sorted(point for point in found if math.isfinite(point[1]))


def draw_lines(axes: Any, lines: Lines, colours: Mapping[str, str], marker: str = "") -> None:
    for name, line in lines.items():
        steps, values = [step for step, _ in line], [value for _, value in line]
        axes.plot(steps, values, color=colours.get(name, SERIES[1]), marker=marker, label=name)
    axes.set_xlabel("step")


def draw_score(axes: Any, lines: Lines, colours: Mapping[str, str]) -> None:
    draw_lines(axes, lines, colours, marker="o")
    for metric, line in lines.items():
        score_axis(axes, metric, [value for _, value in line])


def draw_shares(axes: Any, lines: Lines, colours: Mapping[str, str]) -> None:
    draw_lines(axes, lines, colours)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: percent_text(value, 0))


def score_axis(axes: Any, metric: str, scores: Sequence[float]) -> None:
    """At least two points high, so that noise doesn't look like a difference."""
    middle, half = (max(scores) + min(scores)) / 2, max((max(scores) - min(scores)) * 0.6, 0.01)
    axes.set_ylim(middle - half, middle + half)
    axes.set_ylabel(metric)
    axes.yaxis.set_major_formatter(lambda value, _: score_text(value, metric, 1))


def log_axis(axes: Any, values: Sequence[float]) -> None:
    """A log x-axis with round ticks: matplotlib's own are powers of ten, and most charts span less than one."""
    low, high = min(values) / 1.3, max(values) * 1.3
    steps = (1, 1.5, 2, 3, 5, 7) if high < 8 * low else (1, 2, 5) if high < 100 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    axes.set_xscale("log")
    axes.set_xticks([step * 10.0**power for power in powers for step in steps])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def chart(caption: str, draw: Callable[..., None], *content: Any) -> str:
    """An inline SVG of what `draw(axes, *content)` draws, in the page's colours and as wide as its place."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context(CHART_STYLE | {"svg.hashsalt": caption}):
        figure = Figure(figsize=(4.8, 3.2), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, *content)
        handles, labels = axes.get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))
        if len(legend) > 1:
            columns = min(max(50 // max(map(len, legend)), 1), 4)  # wider than the chart, it would be cut
            look = {"columnspacing": 1.0, "fontsize": 10, "frameon": False, "handlelength": 0.8}
            figure.legend(legend.values(), legend, loc="outside upper left", ncols=columns, **look)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    drawn = file.getvalue()
    for colour, name in PAGE_COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn[drawn.index("<svg") :])  # the same in every chart
    return re.sub(r'width="[^"]*" height="[^"]*"', f'role="img" aria-label="{html.escape(caption)}"', drawn, count=1)


def template(name: str) -> Any:
    """A template from beside this file; a page's escapes what is put in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts = (score_text, percent_text, times_text, ms_text, runtime_text)
    environment.filters |= {text.__name__: text for text in texts} | {"quoted": json.dumps}
    return environment.get_template(name)


def runtime_text(entry: Row) -> str:
    name = RUNTIMES.get(entry["runtime"]) or entry["runtime"]
    return name if entry["precision"] == "fp32" else f"{name} {entry['precision']}"


def score_text(score: float, metric: str, digits: int = 2) -> str:
    return percent_text(score, digits) if metric == "accuracy" else f"{score:.{digits + 2}f}"


def percent_text(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{share * 100:.{digits}f} %"


def times_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def ms_text(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def count_text(count: int) -> str:
    return f"{count:,}" if count < 1e6 else f"{count / 1e6:.1f} M"
