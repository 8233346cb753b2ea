"""Models built for timing under a budget: exported for its runtime and precision, with representative texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.runtimes import build_opener
from compress.export.write import write_targets
from compress.measure.latency import Latency, TimedInputs, summarize_times
from compress.measure.process import Opener, TimingProcess, open_timing_process
from compress.prune.budget import Budget
from compress.quantize.config import QuantizeConfig
from compress.quantize.model import quantize_model
from compress.quantize.prepare import LayerQuantization, convert_quantized
from distill.data.batches.packing import find_padding_id
from distill.data.rows.tagged import Tagged
from distill.data.splits.examples import Examples
from distill.tasks.task import Task
from pipelines.reports.targets import describe_load
from pipelines.runs.console import CALLS, Console
from pipelines.runs.files import count_bytes
from pipelines.stages.deliver.timed_texts import RowBlocks, collate_calls
from pipelines.stages.prepare.compared_texts import measure_lengths, select_texts_and_pairs

TEXTS, MIN_CALLS = 64, 4  # texts that are timed, unless they would be fewer calls
MOST_SECONDS = 60  # seconds of a measurement, unless it would have fewer rounds than LEAST_ROUNDS: texts may be long
LEAST_ROUNDS = 10
MOST_OPENINGS, ROUNDS_OF_OPENING = 5, 4  # times that models are opened at most, and the fewest rounds of each


@dataclass(frozen=True)
class TimedModel:
    """A model ready to be timed: its files, in a folder of the target, and its inputs, by the length of their texts."""

    target: ExportTarget
    folder: Path
    inputs: Mapping[int, Sequence[TimedInputs]]

    @property
    def path(self) -> Path:
        """Folder of its files."""
        return self.folder / str(self.target)

    @property
    def bytes(self) -> int:
        """Size of its files in bytes."""
        return count_bytes(self.path)

    def build_opener(self, threads: int) -> Opener:
        """Returns a function that opens the files, with threads of the runtime."""
        return build_opener(self.target, self.path, threads)


def build_timed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: ExportTarget,
    folder: Path,
    texts: "TimingTexts",
    quantization: QuantizeConfig | None = None,
    *,
    reduce_range: bool = False,
) -> TimedModel:
    """Exports the model into `folder`; with `quantization` the weights are quantized first.

    With `reduce_range`, weights of ONNX Runtime's dynamic int8 quantization have 7 bits.
    """
    inputs = texts.inputs(tokenizer)
    layers = quantize_for_timing(model, quantization, next(iter(inputs.values()))) if quantization is not None else None
    write_targets(Source(model, tokenizer, layers, reduce_range), [target], folder)
    return TimedModel(target, folder, inputs)


def quantize_for_timing(
    model: PreTrainedModel, config: QuantizeConfig, inputs: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, LayerQuantization]:
    """Calibrates and quantizes the model in place, cheaply: representative in speed, not in accuracy."""
    batches = [{name: torch.from_numpy(value) for name, value in batch.items()} for batch in inputs]
    quantize_model(model, replace(config, smoothquant=0, rounding="nearest"), batches)
    return convert_quantized(model)


@dataclass(frozen=True)
class TimingTexts:
    """The texts that models are timed on, the same for every tokenizer."""

    examples: Examples | Tagged
    budget: Budget
    max_length: int
    task: Task

    def inputs(self, tokenizer: PreTrainedTokenizerBase) -> dict[int, list[TimedInputs]]:
        """Returns padded batches by length: to each that the budget sets, texts are repeated or truncated."""
        encoded, pad_id = self.task.encode(tokenizer, self.examples, self.max_length), find_padding_id(tokenizer)
        budget = self.budget
        rows = np.arange(min(len(encoded), count_timed_texts(budget)))
        if len(rows) < budget.batch:  # short documents are packed, several to a row
            rows = np.resize(rows, budget.batch)
        return {each: collate_calls((encoded, pad_id), rows, budget.batch, each) for each in budget.lengths}


def count_timed_texts(budget: Budget) -> int:
    """Returns the number of texts that models are timed on for a budget: TEXTS, or MIN_CALLS batches."""
    return max(MIN_CALLS, -(-TEXTS // budget.batch)) * budget.batch


def draw_texts(examples: Examples | Tagged, budget: Budget, max_length: int, seed: int, task: Task) -> TimingTexts:
    """Returns texts of a split, drawn by the seed with the lengths of the whole split."""
    lengths, count = measure_lengths(examples), count_timed_texts(budget)
    rows = RowBlocks.cut(lengths, min(count, len(lengths)), seed).draw(0)
    if len(rows) < budget.batch:
        rows = np.resize(rows, budget.batch)
    texts, pairs = select_texts_and_pairs(examples, rows)
    drawn = Tagged(texts) if isinstance(examples, Tagged) else Examples(texts, pairs)
    return TimingTexts(drawn, budget, max_length, task)


def time_together(
    models: Mapping[str, TimedModel], budget: Budget, length: int, rounds: int, console: Console, label: str
) -> dict[str, Latency]:
    """Times all models in turn on the same texts of a length in a fresh process, and shows the progress.

    Args:
        models: The models by name.
        budget: The threads they run on.
        length: A length of the budget.
        rounds: Maximum number of runs of each model on each text, see `limit_rounds`; another one, before them, isn't
            counted. The models are opened again several times meanwhile.
        console: Shows the progress.
        label: What is timed.

    Raises:
        TimingError: A model can't be opened or fails, or the process is killed.
    """
    texts = {name: each.inputs[length] for name, each in models.items()}
    calls = min(len(each) for each in texts.values())  # another tokenizer may split a long text into more rows
    inputs = {name: each[:calls] for name, each in texts.items()}
    openers = {name: each.build_opener(budget.threads) for name, each in models.items()}
    with open_timing_process(openers, budget.threads) as process:
        warmup = process.time_rounds(inputs, rounds=1, warmup=0)
        rounds = limit_rounds(rounds, sum(float(each.sum()) for each in warmup.values()) / 1e3)
        with console.track(label, rounds * calls * len(models), CALLS) as advance:
            times = time_openings(process, inputs, rounds, advance)
    if load := describe_load(process.processors.share):
        console.say(f"  {label}: {load}")
    return {name: summarize_times(each, inputs[name], budget.threads) for name, each in times.items()}


def time_openings(
    process: TimingProcess[str],
    inputs: Mapping[str, Sequence[TimedInputs]],
    rounds: int,
    on_calls: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """Divides the rounds among several openings of the models; returns milliseconds [rounds of one, openings x inputs].

    So a text counts once for each opening, with its fastest call: models are slower in one opening than in another.
    """
    count, parts = max(1, min(MOST_OPENINGS, rounds // ROUNDS_OF_OPENING)), []
    for number in range(count):
        if number:
            process.reopen_models()
        parts.append(process.time_rounds(inputs, rounds=rounds // count, warmup=0, on_calls=on_calls))
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in inputs}


def limit_rounds(rounds: int, seconds: float) -> int:
    """Returns `rounds`; if they take more than MOST_SECONDS, at `seconds` each, those that fit or LEAST_ROUNDS."""
    if rounds <= LEAST_ROUNDS or rounds * seconds <= MOST_SECONDS:
        return rounds
    return max(LEAST_ROUNDS, int(MOST_SECONDS / seconds))
