"""How much faster quantized files are than those in float32, on each runtime, and where OpenVINO's time goes.

    python -m benchmarks.quantization.low_bit_speed --student runs/quantized/student --data examples/data/banking77

The folder holds the same student as a run exported it, in float32 and quantized. The files take turns: each runs all
texts of a round, one a call and one after another as in deployment, on one thread. A text's time is its fastest call;
printed are the medians over the texts and their ratio. OpenVINO's files are also timed as models of any length, as they
are read from disk, and the microseconds of each kind of operator on a text of `--length` tokens are listed, from
OpenVINO's own counters.
"""

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import describe_setup
from benchmarks.common.tables import read_table
from compress.export.common.targets import find_target
from compress.export.openvino.ir import OpenVinoModel
from compress.export.runtimes import open_export
from distill.checkpoint.tokenizer import load_tokenizer
from pipelines.runs.console import Console

RUNTIMES = ("onnxruntime", "openvino", "executorch", "litert")
CALLS = 200  # of a text whose operators are listed

PRECISIONS = ("int8", "int4")

Inputs = dict[str, np.ndarray]
Models = dict[tuple[str, str], Any]


class AnyLength:
    """An OpenVINO file run as it is on disk, for texts of any length."""

    def __init__(self, model: OpenVinoModel):
        self.model, self.names = model, model.names

    def __call__(self, inputs: Inputs) -> np.ndarray:
        """Returns the logits."""
        return next(iter(self.model.values(inputs).values()))


def main() -> None:
    """Times all pairs and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", type=Path, required=True, help="folder with a folder for each runtime")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--text", default="text", help="column of the texts")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--length", type=int, default=16, help="tokens of the text whose operators are listed")
    options = parser.parse_args()
    models = open_models(options.student)
    if not models:
        raise SystemExit(f"{options.student}: expected folders such as openvino and openvino-int8, found no pair")
    texts = encode_texts(options, next(iter(models.values())).names)
    milliseconds = time_texts(models, texts, options.rounds)
    console = Console()
    header = ("runtime", "float32 ms", "quantized", "ms", "speed-up")
    console.table(f"{options.student}, {len(texts)} single texts, one thread", header, build_rows(milliseconds))
    for folder in sorted(options.student.glob("openvino*")):
        console.table(f"{folder.name}, {options.length} tokens", ("operator", "number", "µs"), profile(folder, options))
    console.say(describe_setup())


def open_models(student: Path) -> Models:
    """Returns (runtime, precision) -> the opened file, of runtimes with a quantized file."""
    models: Models = {}
    for runtime in RUNTIMES:
        folders = {
            each: student / f"{runtime}-{each}" for each in PRECISIONS if (student / f"{runtime}-{each}").exists()
        }
        if folders and (student / runtime).exists():
            files = {"fp32": student / runtime} | folders
            models |= {(runtime, name): open_export(find_target(file.name), file, 1) for name, file in files.items()}
    for (runtime, name), model in list(models.items()):
        if runtime == "openvino":
            models["openvino, any length", name] = AnyLength(model)
    return models


def encode_texts(options: argparse.Namespace, names: Sequence[str]) -> list[Inputs]:
    """Returns the inputs of texts drawn from the test split."""
    rows = read_table(options.data, "test")
    drawn = np.random.default_rng(0).permutation(len(rows))[: options.texts]
    tokenizer = load_tokenizer(options.student)
    encoded = [tokenizer(rows[i][options.text], truncation=True, max_length=128, return_tensors="np") for i in drawn]
    types = [{"token_type_ids": np.zeros_like(each["input_ids"])} | dict(each) for each in encoded]
    return [{name: each[name].astype(np.int64) for name in names} for each in types]


def time_texts(models: Models, texts: Sequence[Inputs], rounds: int) -> dict[tuple[str, str], float]:
    """Returns the median over the texts of each one's fastest call, in milliseconds."""
    fastest = {key: np.full(len(texts), np.inf) for key in models}
    for _ in range(1 + rounds):
        for key, model in models.items():
            times = [time_call(model, inputs) for inputs in texts]
            fastest[key] = np.minimum(fastest[key], times)
    return {key: 1e3 * float(np.median(seconds)) for key, seconds in fastest.items()}


def time_call(model: Any, inputs: Inputs) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    model(inputs)
    return time.perf_counter() - start


def build_rows(milliseconds: Mapping[tuple[str, str], float]) -> list[tuple[str, ...]]:
    """Returns a line for each quantized file."""
    pairs = [
        (runtime, name, milliseconds[runtime, "fp32"], quantized)
        for (runtime, name), quantized in milliseconds.items()
        if name != "fp32"
    ]
    return [
        (runtime, f"{base:.3f}", name, f"{quantized:.3f}", f"{base / quantized:.2f}")
        for runtime, name, base, quantized in pairs
    ]


def profile(folder: Path, options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Returns each kind of operator of an OpenVINO file, how many there are, and their microseconds."""
    model = OpenVinoModel(folder, threads=1)
    model.settings["PERF_COUNT"] = True
    inputs = {name: np.ones((1, options.length), np.int64) for name in model.names}
    model(inputs)
    (request,) = model.fixed.values()
    costs: dict[str, list[float]] = defaultdict(list)
    numbers: Counter[str] = Counter()
    for _ in range(CALLS):
        model(inputs)
        once: Counter[str] = Counter()
        numbers.clear()
        for each in request.profiling_info:
            kind = f"{each.node_type} ({each.exec_type})"
            once[kind] += each.real_time.total_seconds() * 1e6  # type: ignore[assignment]
            numbers[kind] += each.real_time.total_seconds() > 0
        for kind, microseconds in once.items():
            costs[kind].append(microseconds)
    fastest = {kind: min(calls) for kind, calls in costs.items()}
    total = sum(fastest.values())
    rows = sorted(fastest.items(), key=lambda pair: -pair[1])
    listed = [(kind, str(numbers[kind]), f"{duration:.0f}") for kind, duration in rows if duration >= total / 100]
    return [*listed, ("all", "", f"{total:.0f}")]


if __name__ == "__main__":
    main()
