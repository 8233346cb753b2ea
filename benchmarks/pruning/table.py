"""The comparison of pruned students as a table."""

import statistics
from collections.abc import Sequence

from benchmarks.pruning.results import MeasuredStudent, ModelSize, Results
from pipelines.runs.console import Console

HEADER = ("student", "size", "rate", "speedup", "median", "mean (range)", "score kept", "MB", "M params", "minutes")


def print_table(console: Console, results: Results) -> None:
    """Prints a row for the teacher and for each method."""
    settings, teacher = results["settings"], results["teacher"]
    methods = dict.fromkeys(student["method"] for student in results["students"])
    rows = [
        ("teacher", "", "", "1.00", f"{teacher['test']:.2%}", "", "", *format_sizes([teacher]), ""),
        *(format_method(method, results) for method in methods),
    ]
    budget, seeds = settings["budget"], ", ".join(map(str, settings["seeds"]))
    title = (
        f"{budget['speedup']}x requested, {budget['precision']} on ONNX Runtime, batch 1, 1 thread, "
        f"{settings['train']['epochs']} epochs, seeds {seeds}: test accuracy"
    )
    console.table(title, HEADER, rows)
    console.say(
        f"speedup: median (range) over seeds; noise: the teacher's second copy has {results['teacher_again']:.3f}x. "
        "M params: all / without token embeddings. minutes: training + search for the size (ours for each student)"
    )
    console.say(f"{results['machine']}")


def format_method(method: str, results: Results) -> tuple[str, ...]:
    """Returns the row of a method, over its seeds."""
    students = [student for student in results["students"] if student["method"] == method]
    scores, speedups = [student["test"] for student in students], [student["speedup"] for student in students]
    return (
        method,
        format_labels(students),
        f"{students[0]['rate']:g}",
        f"{statistics.median(speedups):.2f} ({min(speedups):.2f}-{max(speedups):.2f})",
        f"{statistics.median(scores):.2%}",
        f"{statistics.mean(scores):.2%} ({min(scores):.2%}-{max(scores):.2%})",
        f"{statistics.median(scores) / results['teacher']['test']:.1%}",
        *format_sizes(students),
        format_minutes(students),
    )


def format_labels(students: Sequence[MeasuredStudent]) -> str:
    """Returns the size of the students, or of the first one if they differ."""
    labels = list(dict.fromkeys(student["label"] for student in students))
    return labels[0] + (f" (and {len(labels) - 1} others)" if len(labels) > 1 else "")


def format_minutes(students: Sequence[MeasuredStudent]) -> str:
    """Returns the median minutes of training and of the search for the size."""
    training = statistics.median(student["seconds"] for student in students) / 60
    search = statistics.median(student["search_seconds"] for student in students) / 60
    return f"{training:.1f} + {search:.1f}"


def format_sizes(models: Sequence[ModelSize]) -> tuple[str, str]:
    """Returns the median MB on disk, and the median parameters with and without token embeddings."""
    size = statistics.median(model["bytes"] for model in models)
    params = statistics.median(model["params"] for model in models)
    rest = statistics.median(model["without_embeddings"] for model in models)
    return f"{size / 1e6:.1f}", f"{params / 1e6:.2f} / {rest / 1e6:.2f}"
