"""The scores stage: the importance of each unit and layer, estimated from the effect of its removal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from compress.prune.config import PruneConfig
from compress.prune.importance.estimate import activation, layer_losses, magnitude, measure_scores
from compress.prune.importance.scores import Scores
from distill.checkpoint.outputs import find_logits
from distill.checkpoint.pruned import load_pruned
from distill.data.batches.encode import Batch
from distill.losses.teacher_signals import TeacherSignals
from distill.models.inputs import build_inputs
from distill.slicing import Axis
from distill.tasks.logit_rows import OutputRows, facts_of
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.distill_config import DistillConfig
from pipelines.stages.data import read_data, read_task
from pipelines.stages.distill import PrunedStart, cached_signals, drawn_batches, texts_module
from pipelines.stages.prune_inputs import axes_of
from pipelines.stages.vocabulary import tokenizer_of

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
SCORES = "scores.safetensors"
NOISE = 0.5**0.5  # standard deviation of the normal distribution whose KL divergence is the squared difference


def scores_stage(run: Run, config: DistillConfig, data: Artefact, cache: Artefact, start: PrunedStart) -> Artefact:
    """Writes the scores of every unit and layer of the start model, shared by all targets with the same start."""
    settings = {
        "scores": config.prune.scores,
        "samples": config.prune.samples,
        "temperature": config.loss.resolved_temperature,
        "max_length": config.data.max_length,
    }

    def work(folder: Path) -> dict[str, Any]:
        model, task = load_pruned(start.start), read_task(data)
        texts = texts_module(run, config, read_data(data), tokenizer_of(start.start), task=task)
        signals, distance = cached_signals(cache, start), Distance(task.answers, config.loss.resolved_temperature)
        drawn = drawn_batches(texts, config.prune.samples, run.seed, task.at_once)
        seeded = torch.Generator().manual_seed(run.seed)
        batches = [distance.drawn({**batch, "signals": signals(batch)}, seeded) for batch in drawn]
        total = passes(config.prune) * sum(len(batch["input_ids"]) for batch in batches)
        with run.console.track(f"scores: {config.prune.scores}", total) as advance:
            found = score(model, axes_of(model, task), Watched(batches, advance), config.prune, distance)
        found.save(folder / SCORES)
        return {"method": found.method, "samples": found.samples, "layers": found.layers.tolist()}

    name = "scores" if start.name == "start" else f"scores-{start.name}"
    return run.stage(name, settings, {"data": data, "cache": cache} | start.inputs(), work, version=VERSION)


@dataclass(frozen=True)
class Distance:
    """The distance between student and teacher: a number per sample, summed over the sample's rows.

    Args:
        answers: Defines the rows of a batch.
        temperature: The temperature of the loss.
    """

    answers: OutputRows
    temperature: float

    def divergence(self, student: PreTrainedModel, batch: Any) -> Tensor:
        """Returns [samples]: the distance by `OutputRows.distance`, summed over rows."""
        counts = self.answers.counts(batch)
        own, labels = (each.split(counts) for each in (self.rows(student, batch), self.answers.labels(batch)))
        given = by_sample(self.answers.signals(batch, batch["signals"]), counts)
        each = zip(own, given, labels, strict=True)
        sums = [self.answers.distance(o, g, y, self.temperature) * len(o) if len(o) else o.sum() for o, g, y in each]
        return torch.stack(sums)

    def surprise(self, student: PreTrainedModel, batch: Any) -> Tensor:
        """Returns [samples]: -log likelihood of the drawn values, scaled like the divergence's curvature."""
        own, drawn = self.rows(student, batch), batch["drawn"]
        if drawn.is_floating_point():
            rows = (self.answers.point(own) - drawn).square().sum(-1)
        else:
            rows = F.cross_entropy(own / self.temperature, drawn, reduction="none") * self.temperature
        return torch.stack([each.sum() for each in rows.split(self.answers.counts(batch))])

    def rows(self, student: PreTrainedModel, batch: Any) -> Tensor:
        """Returns the student's logits, row by row."""
        said = find_logits(student(**build_inputs(student, batch)))
        assert said is not None
        return self.answers.logits(batch, said).float()

    def drawn(self, batch: Any, seeded: torch.Generator) -> Batch:
        """Returns the batch with a class, or a number, drawn for each row from the teacher's distribution."""
        given = self.answers.signals(batch, batch["signals"])
        if self.answers.labels(batch).is_floating_point():
            point = self.answers.point(given["logits"]).float()
            return batch | {"drawn": point + NOISE * torch.randn(point.shape, generator=seeded)}
        if "logits" in given:
            likely = F.softmax(given["logits"].float() / self.temperature, -1)
        else:
            likely = given["weights"] if "weights" in given else given["log_probs"].exp()
        places = torch.multinomial(likely.float(), 1, generator=seeded)
        words = places if "logits" in given else given["ids"].long().gather(1, places)
        return batch | {"drawn": words.squeeze(1)}


def by_sample(given: TeacherSignals, counts: Sequence[int]) -> list[TeacherSignals]:
    """Splits row-wise signals by sample."""
    tensors = {name: value.split(counts) for name, value in given.items() if isinstance(value, Tensor)}
    parts = [{name: each[i] for name, each in tensors.items()} for i in range(len(counts))]
    return [cast(TeacherSignals, part) | facts_of(given) for part in parts]


class Watched:
    """Batches that report every sample to `advance`, in every pass."""

    def __init__(self, batches: Sequence[Batch], advance: Any):
        self.batches, self.advance = batches, advance

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield batch
            self.advance(len(batch["input_ids"]))


def passes(how: PruneConfig) -> int:
    """Returns how often `score` iterates over the batches: once for layer losses, and once more unless by magnitude."""
    return 1 if how.scores == "magnitude" else 2


def score(
    model: PreTrainedModel, axes: Sequence[Axis], batches: Iterable[Batch], how: PruneConfig, distance: Distance
) -> Scores:
    """Scores units by the configured method, and layers by the increase of the loss when a layer is skipped.

    The gradient of the KL divergence vanishes while student and teacher are still equal. Fisher and Taylor scores are
    therefore computed from the likelihood of classes drawn from the teacher's softened distribution: the mean of its
    squared gradients is the curvature of that divergence.
    """
    if how.scores == "magnitude":
        found = magnitude(model, axes)
    elif how.scores == "activation":
        found = activation(model, axes, (build_inputs(model, batch) for batch in batches))
    else:
        found = measure_scores(model, axes, batches, distance.surprise, (how.scores,))[how.scores]
    return replace(found, layers=layer_losses(model, axes, batches, distance.divergence))
