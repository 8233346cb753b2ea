"""Callbacks that close a model's gates while it trains, to given sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from compress.prune.importance.gates import LAYERS, Gates
from compress.prune.importance.learned_masks import Cost, LearnedMasks, Movement, Open
from compress.prune.schedule import cubic
from compress.prune.search.candidates import best
from compress.prune.search.cost import CostModel, Outline, parts
from distill.slicing import Axis, Kept, Shape

EVERY, CHOICES = 20, 10  # for movement pruning: steps between two selections, and the minimum number of selections
WARMUP = 0.5  # share of the steps over which the target cost of learned masks is ramped
OPEN = 0.95  # initial open probability of learned masks


@dataclass(frozen=True)
class Goal:
    """The sizes of a model at the end of the closing stage.

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


class Closing(Callback):
    """Base callback that sets the gates of every step and has closed all surplus units by the end of the last step.

    Layers that are removed fade together: their gates fall from 1 to 0 along the cubic schedule, because the model
    compensates for a layer more easily gradually than all at once.

    Args:
        gates: Gates of the model that trains; attached by the caller.
        goal: Sizes at the end.
    """

    masks: Movement | LearnedMasks

    def __init__(self, gates: Gates, goal: Goal):
        self.gates, self.goal = gates, goal
        self.steps, self.finished = 0, False
        self.kept: Kept = {name: torch.arange(gates.size(name)) for name in goal.units}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps = int(trainer.estimated_stepping_batches)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = int(trainer.global_step)
        self.gates.set(self.training_gates(step) | self.layer_gates(step, pl_module.device))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.steps:
            self.kept, self.finished = self.choose(self.steps), True
            self.gates.set(self.gates.kept(self.kept) | self.layer_gates(self.steps, pl_module.device))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.finished:
            self.gates.set(self.steady_gates() | self.layer_gates(int(trainer.global_step), pl_module.device))

    def training_gates(self, step: int) -> dict[str, Tensor]:
        """Returns the gates of a training batch."""
        raise NotImplementedError

    def steady_gates(self) -> dict[str, Tensor]:
        """Returns deterministic gates without gradients."""
        raise NotImplementedError

    def ranking(self) -> dict[str, Tensor]:
        """Returns axis name -> importance of each unit, [units]."""
        raise NotImplementedError

    def layer_gates(self, step: int, device: torch.device) -> dict[str, Tensor]:
        """Returns the gates of whole layers at a step; empty if every layer is kept."""
        if len(self.goal.layers) == self.gates.size(LAYERS):
            return {}
        gate = torch.full((self.gates.size(LAYERS),), 1 - cubic(step, 0, self.steps, 0.0, 1.0), device=device)
        gate[list(self.goal.layers)] = 1.0
        return {LAYERS: gate}

    def closed(self, name: str, step: int) -> int:
        """Returns the number of units of an axis that are closed at a step."""
        return round(cubic(step, 0, self.steps, 0.0, self.gates.size(name) - self.goal.units[name]))

    def choose(self, step: int) -> dict[str, Tensor]:
        """Returns the highest-ranked units of each axis, the same number as are open at a step."""
        return {name: best(rank, len(rank) - self.closed(name, step)) for name, rank in self.ranking().items()}

    def shape(self) -> Shape:
        """Returns the remaining units and layers as the argument of `prune`."""
        return Shape(self.goal.layers, {name: units.cpu() for name, units in self.kept.items()})


class MovementClosing(Closing):
    """Closes the units with the lowest accumulated movement scores, selected again every `every` steps.

    Closed heads and neurons may reopen. Closed hidden coordinates may not: they are 0 everywhere, so the gradient of
    their gate reflects only the norms' statistics, not the coordinate's own contribution.
    """

    def __init__(self, gates: Gates, goal: Goal):
        super().__init__(gates, goal)
        self.scores = self.masks = Movement({name: gates.size(name) for name in goal.units})
        self.chosen_at, self.every = -1, EVERY

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.every = max(1, min(EVERY, self.steps // CHOICES))

    def training_gates(self, step: int) -> dict[str, Tensor]:
        if step % self.every == 0 and step != self.chosen_at:  # accumulated batches share a step
            self.kept, self.chosen_at = self.choose(step), step
        return self.scores.gates(self.kept)

    def steady_gates(self) -> dict[str, Tensor]:
        return self.gates.kept(self.kept)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.scores.accumulate()

    def ranking(self) -> dict[str, Tensor]:
        scores = dict(self.scores.scores())
        if "hidden" in scores:
            gone = torch.ones_like(scores["hidden"], dtype=torch.bool)
            gone[self.kept["hidden"].to(gone.device)] = False
            scores["hidden"] = scores["hidden"].masked_fill(gone, float("-inf"))
        return scores

    # The scores are saved with the module, but by now they would select other units than the last selection.
    def state_dict(self) -> dict[str, Any]:
        return {"kept": {name: units.cpu() for name, units in self.kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


class LearnedMaskClosing(Closing):
    """Samples gates from learned masks while training.

    At the end the units that are most likely open are kept, in the number that the goal requires.
    """

    def __init__(self, gates: Gates, goal: Goal, masks: LearnedMasks):
        super().__init__(gates, goal)
        self.learned = self.masks = masks

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.learned.warmup = round(WARMUP * self.steps)

    def training_gates(self, step: int) -> dict[str, Tensor]:
        return self.learned.sample()

    def steady_gates(self) -> dict[str, Tensor]:
        return self.learned.expected()

    def ranking(self) -> dict[str, Tensor]:
        return {name: log_alpha.detach() for name, log_alpha in self.learned.items()}


def expected_cost(costs: CostModel, axes: list[Axis], layers: tuple[int, ...], whole: Outline) -> Cost:
    """Returns a function that maps open probabilities to the expected latency relative to the `whole` model's.

    Only the layers that are kept count. The expectation is exact if units are open independently of one another, since
    head and neuron counts are multiplied only by the width.
    """
    sizes = {axis.name: axis.units for axis in axes}
    total = costs.predict(whole)

    def share(open_units: Open) -> Tensor:
        like = next(iter(open_units.values()))

        def units(name: str, otherwise: int) -> Tensor:
            return open_units[name].sum() if name in open_units else like.new_tensor(float(sizes.get(name, otherwise)))

        hidden = units("hidden", whole.hidden)
        # A layer with a single unit of a kind has no axis.
        heads, ffn = (torch.stack([units(f"layers.{i}.{kind}", 1) for i in layers]).sum() for kind in ("heads", "ffn"))
        found = parts(hidden, len(layers), heads, ffn)
        return sum((c * part for c, part in zip(costs.coefficients, found, strict=True)), like.new_zeros(())) / total

    return share


def learned_masks(sizes: Mapping[str, int], cost: Cost, target: float) -> LearnedMasks:
    """Returns masks trained towards a target cost, or to just below their initial cost if that is lower."""
    begin = float(cost({name: torch.full((size,), OPEN) for name, size in sizes.items()}))
    return LearnedMasks(sizes, cost, target=min(target, 0.999 * begin), warmup=0, start=OPEN)
