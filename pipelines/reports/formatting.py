"""Formats numbers for reports and names their runtimes and scores."""

import math
from collections.abc import Sequence

from pipelines.reports.schema import ModelEntry

NO_VALUE = "–"
RUNTIMES = {
    "pytorch": "PyTorch",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "executorch": "ExecuTorch",
    "litert": "LiteRT",
    "numpy": "numpy",
    "model2vec": "model2vec",
    "static-embedding": "Sentence Transformers",
}
CORRELATIONS = frozenset({"Spearman", "Pearson"})
LOWER_IS_BETTER = frozenset({"perplexity", "RMSE"})  # all scores but these and correlations are shares


def format_runtime(entry: ModelEntry) -> str:
    """Returns the name of an entry's runtime, with the precision if it isn't fp32."""
    name = RUNTIMES.get(entry["runtime"]) or entry["runtime"]
    return name if entry["precision"] == "fp32" else f"{name} {entry['precision']}"


def format_score(score: float, metric: str, digits: int = 2) -> str:
    """Formats a score, as a percentage if it is a share; a dash if undefined, such as a correlation with a constant."""
    if not math.isfinite(score):
        return NO_VALUE
    if metric == "perplexity":
        return f"{score:,.{digits}f}"
    is_share = metric not in CORRELATIONS | LOWER_IS_BETTER
    return format_percent(score, digits) if is_share else f"{score:,.{digits + 2}f}"


def format_metric(metric: str) -> str:
    """Returns the name of a score within a sentence."""
    return f"{metric} correlation" if metric in CORRELATIONS else metric


def format_direction(metric: str) -> str:
    """Returns whether lower or higher is better."""
    return "lower is better" if metric in LOWER_IS_BETTER else "higher is better"


def capitalize_first(text: str) -> str:
    """Returns the text with its first letter capitalized and the others unchanged, as in Span F1."""
    return text[:1].upper() + text[1:]


def format_quantity(count: int, noun: str) -> str:
    """Returns the count with its plural noun or the singular: 1 text, 3,080 texts, 1 pair of sentences."""
    first, _, rest = noun.partition(" of ")
    first = first.removesuffix("s") if count == 1 else first
    return f"{count:,} {first}" + (f" of {rest}" if rest else "")


def format_percent(share: float | None, digits: int = 1) -> str:
    """Formats a share as a percentage; a dash if it is None."""
    return NO_VALUE if share is None else f"{share * 100:.{digits}f} %"


def format_ratio(ratio: float | None) -> str:
    """Formats a speedup; a dash if it is None."""
    return NO_VALUE if ratio is None else f"{ratio:.2f}×"


def format_ms(milliseconds: float) -> str:
    """Formats milliseconds without the unit, to four digits or fewer."""
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def format_megabytes(size: float) -> str:
    """Formats bytes in MB (10⁶ bytes) with the unit."""
    return f"{size / 1e6:.1f} MB"


def format_count(count: int) -> str:
    """Formats a count, in millions from a million on."""
    return f"{count:,}" if count < 1e6 else f"{count / 1e6:.1f} M"


def format_enumeration(texts: Sequence[str]) -> str:
    """Joins texts as in: 9, 8 and 12."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]
