"""How numbers are written in reports, and what its entries are called."""

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


def listed(texts: Sequence[str]) -> str:
    """9, 8 and 12."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]
