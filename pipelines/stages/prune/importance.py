"""The scores stage: the importance of each unit and layer, estimated from the effect of its removal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from transformers import PreTrainedModel

from compress.prune.config import PruneConfig
from compress.prune.importance.estimate import (
    LossInputs,
    measure_layer_losses,
    score_by_activation,
    score_by_gradients,
    score_by_magnitude,
)
from compress.prune.importance.scores import Scores
from compress.prune.reconstruction import measure_moments, save_moments
from distill.checkpoint.custom_models import load_model_folder
from distill.checkpoint.outputs import find_logits
from distill.losses.teacher_signals import TeacherSignals
from distill.models.inputs import build_inputs
from distill.slicing import Axis
from distill.tasks.logit_rows import OutputRows, select_distribution_settings
from pipelines.runs.console import Advance
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.prune.search_device import choose_search_device
from pipelines.stages.prune.start import find_prunable_axes
from pipelines.stages.train.student_start import MOMENTS, StudentStart
from pipelines.stages.train.training_inputs import build_training_texts, draw_batches, open_cached_signals

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
SCORES = "scores.safetensors"
NOISE = 0.5**0.5  # standard deviation of the normal distribution whose KL divergence is the squared difference


def scores_stage(run: Run, config: DistillConfig, data: Artefact, cache: Artefact, start: StudentStart) -> Artefact:
    """Writes the scores of every unit and layer of the start model, shared by all targets with the same start.

    Where pruned layers are reconstructed, it also writes the moments of their inputs.
    """
    settings = {
        "scores": config.prune.scores,
        "samples": config.prune.samples,
        "temperature": config.loss.resolved_temperature,
        "max_length": config.data.max_length,
    }
    settings |= {"moments": True} if config.prune.reconstruct else {}

    def work(folder: Path) -> JsonObject:
        model, task = load_model_folder(start.folder), read_task(data)
        axes, device = find_prunable_axes(model, task), choose_search_device(config.machine.accelerator)
        model.to(device)  # type: ignore[arg-type]
        texts = build_training_texts(run, config, read_data(data), load_student_tokenizer(start.folder), task=task)
        signals = open_cached_signals(cache, start)
        distance = Distance(task.output_rows, config.loss.resolved_temperature)
        drawn = draw_batches(texts, config.prune.samples, run.seed, task.eval_batch_size)
        generator = torch.Generator().manual_seed(run.seed)
        batches = [distance.draw_targets({**batch, "signals": signals(batch)}, generator) for batch in drawn]
        total = count_passes(config.prune) * sum(len(batch["input_ids"]) for batch in batches)
        with run.console.track(f"scores: {config.prune.scores}", total, "samples") as advance:
            scores = score_units(model, axes, CountedBatches(batches, device, advance), config.prune, distance)
        scores.save(folder / SCORES)
        if config.prune.reconstruct:
            inputs = (move_data_to_device(build_inputs(model, batch), device) for batch in batches)
            save_moments(folder / MOMENTS, measure_moments(model, axes, inputs))
        return {"method": scores.method, "samples": scores.samples, "layers": scores.layers.tolist()}

    name = "scores" if start.name == "start" else f"scores-{start.name}"
    return run.stage(name, settings, {"data": data, "cache": cache} | start.inputs(), work, version=VERSION)


@dataclass(frozen=True)
class Distance:
    """The distance between student and teacher: a number per sample, summed over the sample's rows.

    Batches contain the teacher's `signals`, and those of `surprise` the `drawn` targets.

    Args:
        output_rows: Defines the rows of a batch.
        temperature: The temperature of the loss.
    """

    output_rows: OutputRows
    temperature: float

    def divergence(self, student: PreTrainedModel, batch: LossInputs) -> Tensor:
        """Returns [samples]: the distance by `OutputRows.distance`, summed over rows."""
        rows = self.output_rows
        counts = rows.counts(batch)
        logits, labels = (each.split(counts) for each in (self.compute_rows(student, batch), rows.labels(batch)))
        signals = split_by_sample(rows.signals(batch, batch["signals"]), counts)
        sums = [
            rows.distance(output, teacher, label, self.temperature) * len(output) if len(output) else output.sum()
            for output, teacher, label in zip(logits, signals, labels, strict=True)
        ]
        return torch.stack(sums)

    def surprise(self, student: PreTrainedModel, batch: LossInputs) -> Tensor:
        """Returns [samples]: -log likelihood of the drawn targets, scaled like the divergence's curvature."""
        logits, drawn = self.compute_rows(student, batch), batch["drawn"]
        if drawn.is_floating_point():
            rows = (self.output_rows.to_comparable(logits) - drawn).square().sum(-1)
        else:
            rows = F.cross_entropy(logits / self.temperature, drawn, reduction="none") * self.temperature
        return torch.stack([each.sum() for each in rows.split(self.output_rows.counts(batch))])

    def compute_rows(self, student: PreTrainedModel, batch: LossInputs) -> Tensor:
        """Returns the student's logits, row by row."""
        logits = find_logits(student(**build_inputs(student, batch)))
        assert logits is not None
        return self.output_rows.logits(batch, logits).float()

    def draw_targets(self, batch: LossInputs, generator: torch.Generator) -> LossInputs:
        """Returns the batch with a class, or a number, drawn for each row from the teacher's distribution."""
        signals = self.output_rows.signals(batch, batch["signals"])
        if self.output_rows.labels(batch).is_floating_point():
            mean = self.output_rows.to_comparable(signals["logits"]).float()
            return batch | {"drawn": mean + NOISE * torch.randn(mean.shape, generator=generator)}
        if "logits" in signals:
            probabilities = F.softmax(signals["logits"].float() / self.temperature, -1)
        else:
            probabilities = signals["weights"] if "weights" in signals else signals["log_probs"].exp()
        positions = torch.multinomial(probabilities.float(), 1, generator=generator)
        classes = positions if "logits" in signals else signals["ids"].long().gather(1, positions)
        return batch | {"drawn": classes.squeeze(1)}


def split_by_sample(signals: TeacherSignals, counts: Sequence[int]) -> list[TeacherSignals]:
    """Splits row-wise signals by sample."""
    tensors = {name: value.split(counts) for name, value in signals.items() if isinstance(value, Tensor)}
    parts = [{name: each[i] for name, each in tensors.items()} for i in range(len(counts))]
    return [cast(TeacherSignals, part) | select_distribution_settings(signals) for part in parts]


class CountedBatches:
    """Batches that are moved to a device one by one, and report every sample to `advance`, in every pass."""

    def __init__(self, batches: Sequence[LossInputs], device: torch.device, advance: Advance):
        self.batches, self.device, self.advance = batches, device, advance

    def __iter__(self) -> Iterator[LossInputs]:
        """Yields the batches on the device, and counts each after it was used."""
        for batch in self.batches:
            yield move_data_to_device(batch, self.device)
            self.advance(len(batch["input_ids"]))


def count_passes(config: PruneConfig) -> int:
    """Returns how often `score_units` iterates over the batches: for layer losses, and again unless by magnitude."""
    return 1 if config.scores == "magnitude" else 2


def score_units(
    model: PreTrainedModel, axes: Sequence[Axis], batches: Iterable[LossInputs], config: PruneConfig, distance: Distance
) -> Scores:
    """Scores units by the configured method, and layers by the increase of the loss when a layer is skipped.

    The gradient of the KL divergence vanishes while student and teacher are still equal. Fisher and Taylor scores are
    therefore computed from the likelihood of classes drawn from the teacher's softened distribution: the mean of its
    squared gradients is the curvature of that divergence.
    """
    if config.scores == "magnitude":
        scores = score_by_magnitude(model, axes)
    elif config.scores == "activation":
        scores = score_by_activation(model, axes, (build_inputs(model, batch) for batch in batches))
    else:
        scores = score_by_gradients(model, axes, batches, distance.surprise, (config.scores,))[config.scores]
    return replace(scores, layers=measure_layer_losses(model, axes, batches, distance.divergence))
