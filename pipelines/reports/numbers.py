"""Formats numbers for reports and names their runtimes and scores."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
Row = Mapping[str, Any]

RUNTIMES = {
    "pytorch": "PyTorch",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "executorch": "ExecuTorch",
    "litert": "LiteRT",
}


def runtime_text(entry: Row) -> str:
    name = RUNTIMES.get(entry["runtime"]) or entry["runtime"]
    return name if entry["precision"] == "fp32" else f"{name} {entry['precision']}"


CORRELATIONS = frozenset({"Spearman", "Pearson"})
LOWER = frozenset({"perplexity", "RMSE"})  # lower is better; all scores but these and correlations are shares


def score_text(score: float, metric: str, digits: int = 2) -> str:
    """Formats a score, as a percentage if it is a share; a dash if undefined, such as a correlation with a constant."""
    if not math.isfinite(score):
        return "–"
    if metric == "perplexity":
        return f"{score:,.{digits}f}"
    return f"{score:,.{digits + 2}f}" if metric in CORRELATIONS | LOWER else percent_text(score, digits)


def metric_text(metric: str) -> str:
    """Returns the name of a score within a sentence."""
    return f"{metric} correlation" if metric in CORRELATIONS else metric


def direction_text(metric: str) -> str:
    return "lower is better" if metric in LOWER else "higher is better"


def capitalize_first(text: str) -> str:
    """Returns the text with its first letter capitalised and the others unchanged, as in Span F1."""
    return text[:1].upper() + text[1:]


def counted(count: int, things: str) -> str:
    """Returns the count with its noun: 1 text, 3,080 texts, 1 pair of sentences."""
    first, _, rest = things.partition(" of ")
    first = first.removesuffix("s") if count == 1 else first
    return f"{count:,} {first}" + (f" of {rest}" if rest else "")


def percent_text(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{share * 100:.{digits}f} %"


def times_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def ms_text(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def count_text(count: int) -> str:
    return f"{count:,}" if count < 1e6 else f"{count / 1e6:.1f} M"


def listed(texts: Sequence[str]) -> str:
    """Joins texts as in: 9, 8 and 12."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]
