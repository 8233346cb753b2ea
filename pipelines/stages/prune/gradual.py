"""The masking stage: units of the whole model are masked gradually while it trains, and are then removed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from compress.errors import CompressError
from compress.prune.importance.gates import Gates
from compress.prune.importance.learned_masks import LearnedMasks
from compress.prune.search.candidates import get_sizes
from compress.prune.search.cost import ModelSizes
from distill.checkpoint.custom_models import load_model_folder
from distill.data.batches.encode import Batch
from distill.parallel.clip import clip_gradients
from distill.slicing import Axis, prune
from distill.train.config import TrainConfig
from distill.train.logged_values import is_logging_step
from distill.train.module import DistillationModule
from pipelines.reports.pruning_summary import read_costs
from pipelines.runs.files import write_json
from pipelines.runs.manifest import JsonObject
from pipelines.runs.placement import save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import DistillConfig
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import compute_logits
from pipelines.stages.prepare.teacher import MODEL, training_settings
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.prune.gradual_masking import (
    Goal,
    LearnedMasking,
    MovementMasking,
    UnitMasking,
    build_learned_masks,
    expected_cost,
)
from pipelines.stages.prune.shape_inputs import ShapeInputs
from pipelines.stages.prune.start import find_prunable_axes
from pipelines.stages.train.student_start import SHAPE, StudentStart, read_shape
from pipelines.stages.train.training_inputs import build_training_texts, open_cached_signals

VERSION = 6  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
MIN_RATE, MAX_RATE = 0.01, 0.1  # bounds of the learned masks' learning rate
LOG_ODDS_RANGE = 25.0  # distance that their log-odds can move over all steps; from open to closed is 6
MULTIPLIER_RATE_RATIO = 10.0  # of the multipliers' learning rate to the masks'; slower ones overshoot the target
_TOLERANCE = 1e-3  # relative to the largest logit


class MaskedModule(DistillationModule):
    """A distillation module that also trains masks, at separate learning rates and without gradient clipping."""

    def __init__(self, student: PreTrainedModel, masks: torch.nn.Module, **settings: Any):
        super().__init__(student, **settings)
        self.masks = masks

    @property
    def splits_batches(self) -> bool:
        """Whether a batch may be trained in parts: no, since gates are scored after each backward pass."""
        return False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the distillation loss plus the penalty of learned masks; a zero for a batch that is skipped."""
        loss = super().training_step(batch, batch_idx)
        if self.spikes.is_skipping or not isinstance(self.masks, LearnedMasks):
            return loss
        if is_logging_step(self._trainer):
            share = self.masks.cost(self.masks.compute_open_probability()).detach()
            self.log_dict(
                {"train/cost": share, "train/scheduled_cost": self.masks.get_target(self.trainer.global_step)}
            )
        return loss + self.masks.compute_penalty(self.trainer.global_step)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer | LightningOptimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients of the student and of the layer terms, and not those of the masks."""
        if gradient_clip_val:
            clip_gradients([*self.student.parameters(), *self.layer_terms.parameters()], float(gradient_clip_val))

    def build_optimizer(self) -> Optimizer:
        """Returns the optimizer with groups for the masks and multipliers."""
        optimizer = super().build_optimizer()
        if isinstance(self.masks, LearnedMasks):
            rate = min(MAX_RATE, max(MIN_RATE, LOG_ODDS_RANGE / self.total_steps))
            for params, ratio in (
                (list(self.masks.log_alpha.parameters()), 1.0),
                ([self.masks.multipliers], MULTIPLIER_RATE_RATIO),
            ):
                optimizer.add_param_group({"params": params, "lr": ratio * rate, "weight_decay": 0.0})
        return optimizer


def masking_settings(train: TrainConfig, epochs: int) -> TrainConfig:
    """Returns training settings with a constant learning rate and without early stopping.

    Early stopping would restore weights of an earlier step, when fewer units were masked.
    """
    return replace(train, epochs=epochs, schedule="constant", patience=0)


def gradual_masking_stage(
    run: Run, config: DistillConfig, inputs: ShapeInputs, shape: Artefact, name: str, precision: str, epochs: int
) -> Artefact:
    """Trains on the cached signals for `epochs` epochs while units are masked, and writes the model without them.

    Writes `model/`, the start model without the masked units, and `shape.json`, the units that are kept: on each axis
    the same number as in the shape, and the same layers. Loss terms on layers are disabled, because layers lose
    coordinates or are removed.

    Raises:
        CompressError: The pruned model's logits differ from those of the masked model.
    """
    config = replace(config, train=masking_settings(config.train, epochs), loss=config.loss.without_layer_terms)
    settings = {
        "loss": vars(config.loss),
        "train": training_settings(config, "train"),
        "precision": precision,
        "max_length": config.data.max_length,
        "masks": config.prune.masks,
    }
    stages = inputs.by_name() | {"shape": shape}
    used = ("data", "cache", "start", "tokens", "shape", *(["costs"] if config.prune.masks == "learned" else []))

    def work(folder: Path) -> JsonObject:
        task, tokenizer = read_task(inputs.data), load_student_tokenizer(inputs.start.folder / MODEL)
        signals = open_cached_signals(inputs.cache, StudentStart(name, inputs.start, None, inputs.tokens))
        texts = build_training_texts(run, config, read_data(inputs.data), tokenizer, signals, task)
        student = load_model_folder(inputs.start.folder / MODEL)
        axes = find_prunable_axes(student, task)
        masking = build_masking(config, inputs, shape, student, axes)
        lightning.seed_everything(run.seed, verbose=False)
        module = MaskedModule(
            student,
            masking.masks,
            loss=config.loss,
            train=config.train,
            metric=task.scorer(),
            output_rows=task.output_rows,
        )
        # Without the run's world: its other processes wait for the finished stage and don't train.
        job = TrainingJob(
            label="student: masking units",
            train=config.train,
            machine=config.machine,
            precision=precision,
            seed=run.seed,
            console=run.console,
            wandb_folder=run.output / "wandb",
        )
        with masking.gates:
            metrics: JsonObject = fit_module(module, texts, folder, job, [masking])
            small = prune(student, axes, masking.shape(), uniform=config.budget.uniform)
            metrics["gap"] = measure_gap(student, small, next(iter(texts.val_dataloader())))
        save_model(small, tokenizer, folder / MODEL, run.world)
        write_json(folder / SHAPE, {"shape": masking.shape().to_dict(), "sizes": read_shape_file(shape)["sizes"]})
        if isinstance(masking, LearnedMasking):
            with torch.no_grad():
                metrics["cost"] = float(masking.learned.cost(masking.learned.compute_open_probability()))
        return metrics | {"params": small.num_parameters()}

    return run.stage(f"mask-{name}", settings, {each: stages[each] for each in used}, work, version=VERSION)


def build_masking(
    config: DistillConfig, inputs: ShapeInputs, shape: Artefact, student: PreTrainedModel, axes: list[Axis]
) -> UnitMasking:
    """Returns the callback that masks units down to the shape's sizes; learned masks need an axis that loses units."""
    goal, gates = Goal.of(read_shape(shape)), Gates(student, axes)
    if config.prune.masks == "movement" or not goal.units:
        return MovementMasking(gates, goal)
    costs = read_costs(inputs.costs)[0].costs  # of one length: only the speed of masking depends on it
    whole, pruned = get_sizes(axes), ModelSizes.from_dict(read_shape_file(shape)["sizes"])
    cost = expected_cost(costs, axes, goal.layers, whole)
    target = costs.predict(pruned) / costs.predict(whole)
    sizes = {name: gates.get_size(name) for name in goal.units}
    return LearnedMasking(gates, goal, build_learned_masks(sizes, cost, target))


def read_shape_file(shape: Artefact) -> JsonObject:
    """Returns the contents of a shape stage's file."""
    content: JsonObject = json.loads((shape.folder / SHAPE).read_text())
    return content


@torch.no_grad()
def measure_gap(gated: PreTrainedModel, small: PreTrainedModel, batch: Batch) -> float:
    """Returns the largest difference between both models' logits, relative to the largest logit.

    Raises:
        CompressError: The difference exceeds the tolerance.
    """
    before, after = (compute_logits(model.eval(), batch) for model in (gated, small))
    difference = float((before - after).abs().max() / before.abs().max())
    if not difference <= _TOLERANCE:
        raise CompressError(
            f"masking: expected logits without the masked units to differ by at most {_TOLERANCE:.0e} of the largest, "
            f"found {difference:.1e}: the pruned model isn't the model that was trained"
        )
    return difference
