"""Models built for timing under a budget: exported for its runtime and precision, with representative texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.huggingface import TorchModel
from compress.export.common.source import Source
from compress.export.common.targets import FLOAT, ExportTarget
from compress.export.runtimes import open_export
from compress.export.write import write_targets
from compress.measure.latency import Latency, Runner, measure_latency
from compress.prune.budget import Budget
from compress.quantize.config import QuantizeConfig
from compress.quantize.model import quantize_model
from compress.quantize.prepare import LayerQuantization, convert_quantized
from distill.data.rows.tagged import Tagged
from distill.data.splits.examples import Examples
from distill.tasks.task import Task
from pipelines.runs.console import CALLS, Console
from pipelines.runs.files import count_bytes
from pipelines.stages.deliver.evaluate import to_arrays
from pipelines.stages.deliver.export import HUGGINGFACE
from pipelines.stages.prepare.compared_texts import select_texts_and_pairs

TEXTS = 64


@dataclass(frozen=True)
class TimedModel:
    """A model ready to be timed: its files, their runner, and its inputs."""

    target: ExportTarget
    folder: Path
    runner: Runner
    inputs: Sequence[dict[str, np.ndarray]]

    @property
    def bytes(self) -> int:
        """Size of its files in bytes."""
        return count_bytes(self.folder / str(self.target))


def target_for(budget: Budget, *, teacher: bool = False) -> ExportTarget:
    """Returns the export target of a budget; the teacher's is in fp32."""
    name = {"pytorch": "huggingface"}.get(budget.runtime, budget.runtime)
    return ExportTarget(name, "int8" if budget.precision == "int8" and not teacher else FLOAT)


def build_timed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: ExportTarget,
    folder: Path,
    texts: "TimingTexts",
    quantization: QuantizeConfig | None = None,
    *,
    reduced: bool = False,
) -> TimedModel:
    """Exports the model into `folder` and opens the files; with `quantization` the weights are quantized first.

    With `reduced`, weights of ONNX Runtime's dynamic int8 quantization have 7 bits.
    """
    inputs = texts.inputs(tokenizer)
    rounding = quantize_for_timing(model, quantization, inputs) if quantization is not None else None
    write_targets(Source(model, tokenizer, rounding, reduced), [target], folder)
    if target == HUGGINGFACE:
        return TimedModel(target, folder, TorchModel.of(model), inputs)
    runner = open_export(target, folder / str(target), texts.budget.threads)
    return TimedModel(target, folder, runner, inputs)


def quantize_for_timing(
    model: PreTrainedModel, config: QuantizeConfig, inputs: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, LayerQuantization]:
    """Calibrates and quantizes the model in place, cheaply: representative in speed, not in accuracy."""
    batches = [{name: torch.from_numpy(value) for name, value in batch.items()} for batch in inputs]
    quantize_model(model, replace(config, smooth=0, weights="nearest"), batches)
    return convert_quantized(model)


@dataclass(frozen=True)
class TimingTexts:
    """The texts that models are timed on, the same for every tokenizer."""

    examples: Examples | Tagged
    budget: Budget
    max_length: int
    task: Task

    def inputs(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, np.ndarray]]:
        """Returns padded batches; if the budget sets a length, each text is repeated or truncated to it."""
        encoded, pad = self.task.encode(tokenizer, self.examples, self.max_length), int(tokenizer.pad_token_id or 0)
        size = self.budget.batch
        rows = list(range(min(len(encoded), TEXTS * size)))
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        batches = [to_arrays(encoded.collate(group, pad)) for group in groups if len(group) == size]
        return [self._stretch(batch) for batch in batches] if self.budget.length else batches

    def _stretch(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        width = self.budget.length
        times = -(-width // batch["input_ids"].shape[1])
        return {name: np.ascontiguousarray(np.tile(value, (1, times))[:, :width]) for name, value in batch.items()}


def draw_texts(examples: Examples | Tagged, budget: Budget, max_length: int, seed: int, task: Task) -> TimingTexts:
    """Returns texts drawn from a split by the seed: enough for TEXTS calls if the split has as many."""
    rows = np.random.default_rng(seed).permutation(len(examples))[: TEXTS * budget.batch]
    if len(rows) < budget.batch:
        rows = np.resize(rows, budget.batch)
    texts, pairs = select_texts_and_pairs(examples, rows)
    drawn = Tagged(texts) if isinstance(examples, Tagged) else Examples(texts, pairs)
    return TimingTexts(drawn, budget, max_length, task)


def time_together(
    models: Mapping[str, TimedModel], budget: Budget, rounds: int, console: Console, label: str
) -> dict[str, Latency]:
    """Times all models in turn on the same texts, and shows the progress with the label."""
    calls = min(len(each.inputs) for each in models.values())  # another tokenizer may split a long text into more rows
    with console.track(label, (1 + rounds) * calls * len(models), CALLS) as advance:
        return measure_latency(
            {name: each.runner for name, each in models.items()},
            {name: each.inputs[:calls] for name, each in models.items()},
            rounds=rounds,
            threads=budget.threads,
            on_call=lambda: advance(1),
        )
