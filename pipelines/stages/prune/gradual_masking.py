"""Callbacks that mask a model's units gradually while it trains, down to given sizes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from compress.prune.importance.gates import LAYERS, Gates
from compress.prune.importance.learned_masks import Cost, LearnedMasks, MovementScores, Openness
from compress.prune.schedule import interpolate_cubic
from compress.prune.search.cost import CostModel, ModelSizes, list_cost_factors
from distill.slicing import Axis, Kept, Shape
from distill.slicing.ranking import find_highest
from pipelines.runs.manifest import JsonObject

SELECT_EVERY, MIN_SELECTIONS = 20, 10  # for movement pruning: steps between two selections, and their minimum number
_WARMUP = 0.5  # share of the steps over which the target cost of learned masks is ramped
OPEN = 0.95  # initial open probability of learned masks


@dataclass(frozen=True)
class Goal:
    """The sizes of a model at the end of the masking stage.

    Args:
        layers: Indices of the layers that are kept.
        units: Axis name -> number of units that are kept, for every axis that loses units.
    """

    layers: tuple[int, ...]
    units: Mapping[str, int]

    @classmethod
    def of(cls, shape: Shape) -> "Goal":
        """Returns the sizes of a shape, regardless of which units it contains."""
        return cls(shape.layers, {name: len(units) for name, units in shape.kept.items()})


class UnitMasking(Callback):
    """Base callback that sets the gates of every step and has masked all surplus units by the end of the last step.

    Layers that are removed fade together: their gates fall from 1 to 0 along the cubic schedule, because the model
    compensates for a layer more easily gradually than all at once.

    Args:
        gates: Gates of the model that trains; attached by the caller.
        goal: Sizes at the end.
    """

    masks: MovementScores | LearnedMasks

    def __init__(self, gates: Gates, goal: Goal):
        self.gates, self.goal = gates, goal
        self.steps, self.finished = 0, False
        self.kept: Kept = {name: torch.arange(gates.get_size(name)) for name in goal.units}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the number of steps."""
        self.steps = int(trainer.estimated_stepping_batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Sets the gates of the step."""
        step = int(trainer.global_step)
        self.gates.set(self.training_gates(step) | self.layer_gates(step, pl_module.device))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Chooses the remaining units after the last step."""
        if trainer.global_step >= self.steps:
            self.kept, self.finished = self.choose_open(self.steps), True
            self.set_final_gates(pl_module.device)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the final gates again: a training that was stopped after its last step resumes without any batch."""
        if self.finished:
            self.set_final_gates(pl_module.device)

    def set_final_gates(self, device: torch.device) -> None:
        """Opens the gates of the remaining units and layers, and closes all others."""
        kept = {name: units.to(device) for name, units in self.kept.items()}
        self.gates.set(self.gates.make_mask(kept) | self.build_layer_gates(0.0, device))

    # The scores and masks are saved with the module, but by now they might select other units.
    def state_dict(self) -> JsonObject:
        """Returns the last selection, and whether it is final."""
        return {"kept": {name: units.cpu() for name, units in self.kept.items()}, "finished": self.finished}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Restores the last selection."""
        self.kept, self.finished = state_dict["kept"], state_dict.get("finished", False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets deterministic gates for the validation."""
        if not self.finished:
            self.gates.set(self.validation_gates() | self.layer_gates(int(trainer.global_step), pl_module.device))

    def training_gates(self, step: int) -> dict[str, Tensor]:
        """Returns the gates of a training batch."""
        raise NotImplementedError

    def validation_gates(self) -> dict[str, Tensor]:
        """Returns deterministic gates without gradients."""
        raise NotImplementedError

    def rank_units(self) -> dict[str, Tensor]:
        """Returns axis name -> importance of each unit, [units]."""
        raise NotImplementedError

    def layer_gates(self, step: int, device: torch.device) -> dict[str, Tensor]:
        """Returns the gates of whole layers at a step."""
        return self.build_layer_gates(1 - interpolate_cubic(step, 0, self.steps, 0.0, 1.0), device)

    def build_layer_gates(self, openness: float, device: torch.device) -> dict[str, Tensor]:
        """Returns a gate for each layer: 1 if it is kept, otherwise `openness`; empty if every layer is kept."""
        if len(self.goal.layers) == self.gates.get_size(LAYERS):
            return {}
        gate = torch.full((self.gates.get_size(LAYERS),), openness, device=device)
        gate[list(self.goal.layers)] = 1.0
        return {LAYERS: gate}

    def count_closed(self, name: str, step: int) -> int:
        """Returns the number of units of an axis that are masked at a step."""
        return round(interpolate_cubic(step, 0, self.steps, 0.0, self.gates.get_size(name) - self.goal.units[name]))

    def choose_open(self, step: int) -> dict[str, Tensor]:
        """Returns the highest-ranked units of each axis, the same number as are open at a step."""
        return {
            name: find_highest(rank, len(rank) - self.count_closed(name, step))
            for name, rank in self.rank_units().items()
        }

    def shape(self) -> Shape:
        """Returns the remaining units and layers as the argument of `prune`."""
        return Shape(self.goal.layers, {name: units.cpu() for name, units in self.kept.items()})


class MovementMasking(UnitMasking):
    """Closes the units with the lowest accumulated movement scores, selected again every `every` steps.

    Closed heads and neurons may reopen. Closed hidden coordinates may not: they are 0 everywhere, so the gradient of
    their gate reflects only the norms' statistics, not the coordinate's own contribution.
    """

    def __init__(self, gates: Gates, goal: Goal):
        super().__init__(gates, goal)
        self.scores = self.masks = MovementScores({name: gates.get_size(name) for name in goal.units})
        self.selected_at, self.every = -1, SELECT_EVERY

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the number of steps and derives the interval of selections."""
        super().on_train_start(trainer, pl_module)
        self.every = max(1, min(SELECT_EVERY, self.steps // MIN_SELECTIONS))

    def training_gates(self, step: int) -> dict[str, Tensor]:
        """Returns gates that are open for the selected units and pass gradients to the scores."""
        if step % self.every == 0 and step != self.selected_at:  # accumulated batches share a step
            self.kept, self.selected_at = self.choose_open(step), step
        return self.scores.make_gates(self.kept)

    def validation_gates(self) -> dict[str, Tensor]:
        """Returns gates that are open for the selected units."""
        return self.gates.make_mask(self.kept)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the gates' gradients to the scores."""
        self.scores.accumulate()

    def rank_units(self) -> dict[str, Tensor]:
        """Returns the scores; those of masked hidden coordinates are -inf."""
        scores = dict(self.scores.scores())
        if "hidden" in scores:
            gone = torch.ones_like(scores["hidden"], dtype=torch.bool)
            gone[self.kept["hidden"].to(gone.device)] = False
            scores["hidden"] = scores["hidden"].masked_fill(gone, float("-inf"))
        return scores


class LearnedMasking(UnitMasking):
    """Samples gates from learned masks while training.

    At the end the units that are most likely open are kept, in the number that the goal requires.
    """

    def __init__(self, gates: Gates, goal: Goal, masks: LearnedMasks):
        super().__init__(gates, goal)
        self.learned = self.masks = masks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the number of steps and sets the warm-up of the masks' target."""
        super().on_train_start(trainer, pl_module)
        self.learned.warmup = round(_WARMUP * self.steps)

    def training_gates(self, step: int) -> dict[str, Tensor]:
        """Returns gates sampled from the masks."""
        return self.learned.sample()

    def validation_gates(self) -> dict[str, Tensor]:
        """Returns the masks' mean gates."""
        return self.learned.compute_mean_gates()

    def rank_units(self) -> dict[str, Tensor]:
        """Returns the log-odds that each unit is open."""
        return {name: log_alpha.detach() for name, log_alpha in self.learned.get_log_alphas()}


def expected_cost(costs: CostModel, axes: list[Axis], layers: tuple[int, ...], whole: ModelSizes) -> Cost:
    """Returns a function that maps open probabilities to the expected latency relative to the `whole` model's.

    Only the layers that are kept count. The expectation is exact if units are open independently of one another, since
    head and neuron counts are multiplied only by the width.
    """
    sizes = {axis.name: axis.units for axis in axes}
    total = costs.predict(whole)

    def share(open_units: Openness) -> Tensor:
        like = next(iter(open_units.values()))

        def units(name: str, otherwise: int) -> Tensor:
            return open_units[name].sum() if name in open_units else like.new_tensor(float(sizes.get(name, otherwise)))

        hidden = units("hidden", whole.hidden)
        # A layer with a single unit of a kind has no axis.
        heads, ffn = (torch.stack([units(f"layers.{i}.{kind}", 1) for i in layers]).sum() for kind in ("heads", "ffn"))
        cost = like.new_zeros(())
        factors = list_cost_factors(hidden, len(layers), heads, ffn)
        for coefficient, factor in zip(costs.coefficients, factors, strict=True):
            cost = cost + coefficient * factor
        return cost / total

    return share


def build_learned_masks(sizes: Mapping[str, int], cost: Cost, target: float) -> LearnedMasks:
    """Returns masks trained towards a target cost, or to just below their initial cost if that is lower."""
    initial = float(cost({name: torch.full((size,), OPEN) for name, size in sizes.items()}))
    return LearnedMasks(sizes, cost, target=min(target, 0.999 * initial), warmup=0, start=OPEN)
