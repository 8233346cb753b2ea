"""Units that close while a model trains: how many is given, which is learned; and the callbacks that close them."""

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
from compress.prune.slicing.slice import Shape
from compress.prune.tracing.axes import Axis, Kept

EVERY, CHOICES = 20, 10  # steps between two choices of the units that are closed by movement; at least so many choices
WARMUP = 0.5  # share of the steps in which learned masks are pushed to the target
OPEN = 0.95  # probability of being open that learned masks start from


@dataclass(frozen=True)
class Goal:
    """What is left of a model at the end.

    Args:
        layers: Numbers of the layers that stay.
        units: Axis name -> how many of its units stay, for every axis that loses some.
    """

    layers: tuple[int, ...]
    units: Mapping[str, int]

    @classmethod
    def of(cls, shape: Shape) -> "Goal":
        """The sizes of a shape, whichever units it chose."""
        return cls(shape.layers, {name: len(units) for name, units in shape.kept.items()})


class Closing(Callback):
    """Sets the gates of every step, and closes what has to go by the end of the last one.

    Layers that go fade together: their gates fall from 1 to 0 along the cubic schedule, as what a layer adds is easier
    made up for bit by bit than all at once.

    Args:
        gates: Of the model that trains; attached by the caller.
        goal: What is left at the end.
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
        """Gates of a training batch."""
        raise NotImplementedError

    def steady_gates(self) -> dict[str, Tensor]:
        """Gates without chance or gradients."""
        raise NotImplementedError

    def ranking(self) -> dict[str, Tensor]:
        """Axis name -> what each unit is worth, [units]."""
        raise NotImplementedError

    def layer_gates(self, step: int, device: torch.device) -> dict[str, Tensor]:
        if len(self.goal.layers) == self.gates.size(LAYERS):
            return {}
        gate = torch.full((self.gates.size(LAYERS),), 1 - cubic(step, 0, self.steps, 0.0, 1.0), device=device)
        gate[list(self.goal.layers)] = 1.0
        return {LAYERS: gate}

    def closed(self, name: str, step: int) -> int:
        """How many units of an axis are closed at a step."""
        return round(cubic(step, 0, self.steps, 0.0, self.gates.size(name) - self.goal.units[name]))

    def choose(self, step: int) -> dict[str, Tensor]:
        """The units of the highest rank, as many as are open at a step."""
        return {name: best(rank, len(rank) - self.closed(name, step)) for name, rank in self.ranking().items()}

    def shape(self) -> Shape:
        """What is left, for `prune`."""
        return Shape(self.goal.layers, {name: units.cpu() for name, units in self.kept.items()})


class ByMovement(Closing):
    """Closes the units with the lowest movement scores so far, chosen anew every `every` steps.

    Heads and neurons that were closed may come back. A hidden coordinate may not: closed it is 0 everywhere, so that
    what its gate is pushed by is the norms' statistics and nothing that it would say.
    """

    def __init__(self, gates: Gates, goal: Goal):
        super().__init__(gates, goal)
        self.scores = self.masks = Movement({name: gates.size(name) for name in goal.units})
        self.chosen_at, self.every = -1, EVERY

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.every = max(1, min(EVERY, self.steps // CHOICES))

    def training_gates(self, step: int) -> dict[str, Tensor]:
        if step % self.every == 0 and step != self.chosen_at:  # batches that are accumulated share a step
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

    # The scores are the module's, and kept with it; by now they would choose others than those closed last.
    def state_dict(self) -> dict[str, Any]:
        return {"kept": {name: units.cpu() for name, units in self.kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


class ByLearning(Closing):
    """Gates drawn from learned masks; at the end the units most likely open stay, as many as the goal says."""

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
    """Expected milliseconds of the layers that stay, as a share of those of the `whole` model.

    Exact where units are open independently of one another: heads and neurons are multiplied by the width alone.
    """
    sizes = {axis.name: axis.units for axis in axes}
    total = costs.predict(whole)

    def share(open_units: Open) -> Tensor:
        like = next(iter(open_units.values()))

        def units(name: str, otherwise: int) -> Tensor:
            return open_units[name].sum() if name in open_units else like.new_tensor(float(sizes.get(name, otherwise)))

        hidden = units("hidden", whole.hidden)
        # An axis of one unit isn't listed.
        heads, ffn = (torch.stack([units(f"layers.{i}.{kind}", 1) for i in layers]).sum() for kind in ("heads", "ffn"))
        found = parts(hidden, len(layers), heads, ffn)
        return sum((c * part for c, part in zip(costs.coefficients, found, strict=True)), like.new_zeros(())) / total

    return share


def learned_masks(sizes: Mapping[str, int], cost: Cost, target: float) -> LearnedMasks:
    """Masks of these axes, pushed to a cost; to what they start from where that is less already."""
    begin = float(cost({name: torch.full((size,), OPEN) for name, size in sizes.items()}))
    return LearnedMasks(sizes, cost, target=min(target, 0.999 * begin), warmup=0, start=OPEN)
