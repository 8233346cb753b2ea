"""The comparison of pruned students as a table."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.runs.console import Console


def show(console: Console, results: Mapping[str, Any]) -> None:
    settings, teacher, machine = results["settings"], results["teacher"], results["machine"]
    rows = [
        ("teacher", "", "", "1.00", f"{teacher['test']:.2%}", "", "", *sizes_shown([teacher]), ""),
        *(row(way, results) for way in dict.fromkeys(student["way"] for student in results["students"])),
    ]
    header = ("student", "size", "rate", "speed-up", "median", "mean (range)", "kept", "MB", "M params", "minutes")
    title = (
        f"{settings['budget']['speedup']}x asked for, {settings['budget']['precision']} on ONNX Runtime, batch 1, "
        f"1 thread, {settings['train']['epochs']} epochs, seeds {', '.join(map(str, settings['seeds']))}: test accuracy"
    )
    console.table(title, header, rows)
    console.say(
        f"speed-up: median (range) over seeds; the teacher's own copy: {results['teacher_again']:.3f}x, which is "
        "noise. M params: all / without words. minutes: training + choosing the size (ours for each student)"
    )
    console.say(f"{machine}")


def row(way: str, results: Mapping[str, Any]) -> tuple[str, ...]:
    """One way, over its seeds."""
    students = [student for student in results["students"] if student["way"] == way]
    scores, speeds = ([student[name] for student in students] for name in ("test", "speedup"))
    labels = list(dict.fromkeys(student["label"] for student in students))
    minutes, search = (
        statistics.median(student[name] for student in students) / 60 for name in ("seconds", "search_seconds")
    )
    return (
        way,
        labels[0] + (f" (and {len(labels) - 1} others)" if len(labels) > 1 else ""),
        f"{students[0]['rate']:g}",
        f"{statistics.median(speeds):.2f} ({min(speeds):.2f}-{max(speeds):.2f})",
        f"{statistics.median(scores):.2%}",
        f"{statistics.mean(scores):.2%} ({min(scores):.2%}-{max(scores):.2%})",
        f"{statistics.median(scores) / results['teacher']['test']:.1%}",
        *sizes_shown(students),
        f"{minutes:.1f} + {search:.1f}",
    )


def sizes_shown(models: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    size, params, rest = (statistics.median(m[name] for m in models) for name in ("bytes", "params", "without_words"))
    return f"{size / 1e6:.1f}", f"{params / 1e6:.2f} / {rest / 1e6:.2f}"
