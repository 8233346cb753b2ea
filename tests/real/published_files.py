"""What a run must leave: the table of results on the terminal, and files that stock libraries load."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from real.full_runs import FullRun

SCRIPT = Path(__file__).with_name("stock_models.py")
RUNTIMES = {"pytorch": "PyTorch", "onnxruntime": "ONNX Runtime"}


@dataclass(frozen=True)
class StockResult:
    """What stock libraries computed from a published folder.

    Args:
        parameters: Parameters of the checkpoint.
        flops: FLOPs of the checkpoint on a text of 32 tokens.
        labels: Names of the classes, by number.
        predictions: Model ("pytorch", or the name of an ONNX folder) -> predictions for each text, see `SCRIPT`.
    """

    parameters: int
    flops: int
    labels: dict[str, str]
    predictions: dict[str, list[Any]]

    def share_equal(self, one: str, other: str) -> float:
        """Returns the share of predictions in which two models agree."""
        pairs = [
            pair
            for first, second in zip(self.predictions[one], self.predictions[other], strict=True)
            for pair in zip(as_list(first), as_list(second), strict=True)
        ]
        return sum(a == b for a, b in pairs) / len(pairs)

    def accuracy(self, name: str, labels: Sequence[str]) -> float:
        """Returns the share of texts whose predicted class has the right name."""
        predicted = [self.labels[str(number)] for number in self.predictions[name]]
        return sum(a == b for a, b in zip(predicted, labels, strict=True)) / len(labels)

    def tags(self, name: str) -> list[list[str]]:
        """Returns the tag of each word; words beyond the maximum length have "O"."""
        return [
            ["O" if number is None else self.labels[str(number)] for number in row] for row in self.predictions[name]
        ]


def as_list(prediction: Any) -> list[Any]:
    return prediction if isinstance(prediction, list) else [prediction]


def run_stock_models(
    checkpoint: Path,
    texts: Sequence[Any],
    onnx: Sequence[str] = (),
    *,
    task: str,
    max_length: int,
    remote: bool = False,
) -> StockResult:
    """Loads a checkpoint, and ONNX folders in it, with stock libraries in a process of its own.

    Args:
        checkpoint: Folder for `from_pretrained`.
        texts: Texts, or lists of words for a tagger.
        onnx: Names of subfolders with a `model.onnx`.
        task: Task of the model.
        max_length: Longer texts are truncated.
        remote: Allow the checkpoint's own modelling code.
    """
    request = {"task": task, "checkpoint": str(checkpoint), "texts": list(texts), "max_length": max_length}
    request |= {"onnx": {name: str(checkpoint / name) for name in onnx}, "trust_remote_code": remote}
    with TemporaryDirectory() as folder:
        request_file, result_file = (Path(folder) / f"{name}.json" for name in ("request", "answer"))
        request_file.write_text(json.dumps(request))
        arguments = [sys.executable, "-P", str(SCRIPT), str(request_file), str(result_file)]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path(folder) / "cache")}
        done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
        return StockResult(**json.loads(result_file.read_text()))


def check_summary(run: FullRun) -> None:
    """Checks that the terminal shows each model's score, parameters and size, as they are in the report."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run.done.output.splitlines()]
    for entry in run.report["models"]:
        runtime = RUNTIMES[entry["runtime"]] + ("" if entry["precision"] == "fp32" else f" {entry['precision']}")
        wanted = [entry["name"], runtime, f"{entry['score']:.2%}".replace("%", " %")]
        row = next((row for row in rows if row[:3] == wanted), None)
        assert row, f"{wanted} isn't in the table:\n{run.done.output}"
        assert row[3:5] == [f"{entry['params'] / 1e6:.1f} M", f"{entry['bytes'] / 1e6:.1f}"]


def floor_of(score: float, count: int) -> float:
    """Returns a measured share minus three of its standard errors, sqrt(p (1 - p) / n).

    The bits of a run depend on the processor, and its precision and pruned shapes on timings: another machine trains
    another student. Students of several seeds differ by much less than this margin (docs/benchmarks/pruning.md: at most
    0.4 points on Banking77), and anything that breaks training costs more.
    """
    return score - 3 * sqrt(score * (1 - score) / count)
