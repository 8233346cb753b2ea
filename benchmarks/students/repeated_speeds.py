"""Speeds of finished runs measured again: are the speed-ups in their reports what a user finds later?

    python -m benchmarks.students.repeated_speeds runs/frontier/*/seed-* --output runs/repeated-speeds

For each student with a requested speed-up, its deployed file and its teacher's are opened with onnxruntime and the
tokenizers library alone, so that none of the code that measured the first time takes part. Both run in turn, one text a
call, in blocks of 16 texts that are drawn from the test split anew; a text's time is its fastest call, and the speed-up
is the ratio of the medians over the texts.

Printed per student: the requested speed-up, the report's with its interval, the repeated one, their ratio, and the
hours between them; at the end how many are within 5 % of the request or above it, and how many within 10 % of the
report.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import onnxruntime
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from benchmarks.common.machine import describe_setup
from benchmarks.common.results_folder import Results, check_settings, read_report, require_entry
from pipelines.reports.schema import ModelEntry, Report
from pipelines.runs.console import Console

BLOCK, ROUNDS = 16, 8  # texts that a model runs uninterrupted, and calls of each
WARMUP = 0.01  # seconds that a model runs before its block is timed
MISSED, DRIFTED = 0.05, 0.10  # accepted deviations from the requested speed and from the report's

Inputs = dict[str, np.ndarray]


class RepeatedSpeed(TypedDict):
    """A line of results.jsonl: both speed-ups of a student, and the hours between the measurements."""

    run: str
    created: str
    student: str
    requested: float
    reported: float
    low: float
    high: float | None
    repeated: float
    hours: float


class OnnxModel:
    """An exported model, opened for one text a call.

    Args:
        folder: Folder of `model.onnx` and `tokenizer.json`.
        max_length: Tokens after which texts are truncated.
    """

    def __init__(self, folder: Path, max_length: int):
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = settings.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", settings, ["CPUExecutionProvider"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        side = (self.tokenizer.truncation or {}).get("direction", "right")
        self.tokenizer.enable_truncation(max_length, direction=side)
        self.names = [each.name for each in self.session.get_inputs()]

    def encode(self, text: Any) -> Inputs:
        """Returns the inputs of a text, of a pair of texts or of a list of words."""
        is_words = isinstance(text, list)
        encoding = self.tokenizer.encode(*(text if isinstance(text, tuple) else (text,)), is_pretokenized=is_words)
        columns = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        return {name: np.asarray([columns[name]], np.int64) for name in self.names}

    def time_texts(self, inputs: Sequence[Inputs]) -> list[float]:
        """Returns the seconds of each text, once the model has run on its own for WARMUP seconds."""
        begin = time.perf_counter()
        for each in cycle(inputs):
            self.session.run(None, each)
            if time.perf_counter() - begin >= WARMUP:
                break
        seconds = []
        for each in inputs:
            start = time.perf_counter()
            self.session.run(None, each)
            seconds.append(time.perf_counter() - start)
        return seconds


def main() -> None:
    """Measures the students that have no result, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--texts", type=int, default=512, help="texts that are timed")
    parser.add_argument("--seed", type=int, default=1000, help="seed of the choice of texts")
    parser.add_argument("--output", type=Path, default=Path("runs/repeated-speeds"))
    options = parser.parse_args()
    if options.texts < BLOCK:
        parser.error(f"--texts: expected at least {BLOCK}, a block, found {options.texts}")
    check_settings(options.output, options, free=("runs",))
    results: Results[RepeatedSpeed] = Results(options.output)
    speeds = []
    for run in options.runs:
        report = read_report(run)
        for entry in (each for each in report["models"] if "target" in each and each["target"]["target"]["speedup"]):
            known = results.find(run=str(run), created=report["created"], student=entry["name"])
            speeds.append(known or results.add(measure_again(run, report, entry, options.texts, options.seed)))
    print_table(speeds)


def measure_again(run: Path, report: Report, entry: ModelEntry, count: int, seed: int) -> RepeatedSpeed:
    """Returns the two measurements of a student of a run."""
    max_length = int(report["config"]["data"]["max_length"])
    models = [OnnxModel(Path(each["path"]), max_length) for each in (require_entry(report, "teacher"), entry)]
    texts = draw_texts(run, count, seed)
    fastest: list[list[float]] = [[], []]
    for start in range(0, len(texts) - BLOCK + 1, BLOCK):
        block = texts[start : start + BLOCK]
        inputs = [[model.encode(text) for text in block] for model in models]
        times = np.array([[m.time_texts(i) for m, i in zip(models, inputs, strict=True)] for _ in range(ROUNDS)])
        for known, block_seconds in zip(fastest, times.min(axis=0), strict=True):
            known += block_seconds.tolist()
    first = entry["target"]["speedup"]
    return RepeatedSpeed(
        run=str(run),
        created=report["created"],
        student=entry["name"],
        requested=entry["target"]["target"]["speedup"],
        reported=first["value"],
        low=first["low"],
        high=first["high"],
        repeated=float(np.median(fastest[0]) / np.median(fastest[1])),
        hours=(datetime.now(UTC) - datetime.fromisoformat(report["created"])).total_seconds() / 3600,
    )


def draw_texts(run: Path, count: int, seed: int) -> list[Any]:
    """Returns test texts of the run's data stage, drawn by the seed; repeated if there are fewer."""
    report = read_report(run)
    stage = next(each["folder"] for each in report["stages"] if each["name"] == "data")
    texts = list(read_texts(run / "data" / Path(stage).name / "test.parquet", report["task"]))
    rng = np.random.default_rng(seed)
    turns = [rng.permutation(len(texts)) for _ in range(-(-count // len(texts)))]
    return [texts[number] for number in np.concatenate(turns)[:count]]


def read_texts(file: Path, task: str) -> Iterator[Any]:
    """Yields each row's text, pair of texts or words; a sentence encoder gets the texts of a pair one by one."""
    for row in pq.read_table(file).to_pylist():
        if "tokens" in row:
            yield row["tokens"]
            continue
        texts = [row["text"], row["text2"]] if row.get("text2") else [row["text"]]
        if task == "sentence-embedding":
            yield from texts
        else:
            yield tuple(texts) if len(texts) == 2 else texts[0]


def print_table(speeds: Sequence[RepeatedSpeed]) -> None:
    """Prints a line for each student, and how many reach the requested speed."""
    rows = [format_row(each) for each in speeds]
    console = Console()
    header = ("run", "student", "requested", "report", "again", "again / report", "hours")
    console.table("speed-ups, ONNX Runtime, one text a call, one thread", header, rows)
    reached = sum(each["reported"] >= (1 - MISSED) * each["requested"] for each in speeds)
    equal = sum(abs(each["repeated"] / each["reported"] - 1) <= DRIFTED for each in speeds)
    console.say(f"{reached} of {len(speeds)} reports are at most {MISSED:.0%} below the requested speed-up")
    console.say(f"{equal} of {len(speeds)} repeated speed-ups are within {DRIFTED:.0%} of the report's")
    console.say(describe_setup())


def format_row(each: RepeatedSpeed) -> tuple[str, ...]:
    """Returns a line of the table."""
    interval = f"{each['low']:.2f}-" + (f"{each['high']:.2f}" if each["high"] is not None else "")
    ratio = each["repeated"] / each["reported"]
    return (
        each["run"], each["student"], f"{each['requested']:g}", f"{each['reported']:.2f} ({interval})",
        f"{each['repeated']:.2f}", f"{ratio:.3f}", f"{each['hours']:.1f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
