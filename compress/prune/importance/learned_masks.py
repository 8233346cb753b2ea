"""Masks trained beside the weights: hard-concrete gates with a Lagrangian size constraint, and movement scores."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CompressError
from compress.prune.importance.gates import LAYERS
from distill.checkpoint.layers import find_layer_stack
from distill.slicing import Axis

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1  # of the hard-concrete distribution (Louizos et al. 2018, section 4)
CUT = TEMPERATURE * math.log(-LOW / HIGH)  # a gate is closed (exactly 0) if logit(noise) + log_alpha is below it

Open = Mapping[str, Tensor]  # axis name, or `layers` -> openness of each unit, 0 to 1, [units]
Cost = Callable[[Open], Tensor]  # openness of units -> cost of the model, a scalar in the target's unit


class LearnedMasks(nn.Module):
    """Hard-concrete gates, and the penalty that drives their expected cost to a target.

    Train the parameters beside the weights with one minimising optimizer (the multipliers' gradients are reversed, so
    they ascend) in groups without weight decay, which would pull gates open or shut; add `penalty(step)` to the loss;
    pass each step's `sample()` to `Gates.set`.

    Args:
        units: Axis name, or `layers` -> number of units: `Gates.sizes`, or a subset of its entries.
        cost: Expected cost as a function of the probabilities of being open, such as `parameter_share`.
        target: Cost to reach.
        warmup: Steps in which the target falls linearly from the initial cost.
        start: Initial probability of being open.

    Raises:
        CompressError: The target isn't between 0 and the initial cost.

    Source: gates: Louizos et al. 2018 (arXiv 1712.01312), equations 10 to 12. Penalty: Wang et al. 2020 (arXiv
        1910.04732), as in Xia et al. 2022 (CoFi, arXiv 2204.00408), who use shares of encoder weights; here any cost.
    """

    begin: Tensor

    def __init__(self, units: Mapping[str, int], cost: Cost, *, target: float, warmup: int, start: float = 0.95):
        super().__init__()
        self.names = {name: name.replace(".", "-") for name in units}  # parameter names must not contain dots
        log_alpha = math.log(start / (1 - start)) + CUT
        filled = {self.names[name]: nn.Parameter(torch.full((size,), log_alpha)) for name, size in units.items()}
        self.log_alpha = nn.ParameterDict(filled)
        self.multipliers = nn.Parameter(torch.zeros(2))
        self.cost, self.target, self.warmup = cost, target, warmup
        with torch.no_grad():
            self.register_buffer("begin", cost(self.open_probability()).detach().float().clone())
        if not 0 < target <= float(self.begin):
            raise CompressError(
                f"target {target}: expected more than 0 and at most the cost at the start, {float(self.begin):.4g}: "
                "masks would be learned for nothing"
            )

    def sample(self) -> dict[str, Tensor]:
        """Samples gates [units] with torch's generator: exactly 0 or 1 with some probability, otherwise in between."""
        return {name: hard_concrete(logistic_noise(log_alpha) + log_alpha) for name, log_alpha in self.items()}

    def expected(self) -> dict[str, Tensor]:
        """Returns the mean of `sample()` [units]: gates for a deterministic forward pass."""
        return {name: mean_gate(log_alpha) for name, log_alpha in self.items()}

    def open_probability(self) -> dict[str, Tensor]:
        """Returns the probability that a sampled gate isn't 0, [units]."""
        return {name: torch.sigmoid(log_alpha - CUT) for name, log_alpha in self.items()}

    def penalty(self, step: int) -> Tensor:
        """Returns l1 (c - t) + l2 (c - t)^2 of the expected cost c and the step's target t; multipliers l ascend."""
        excess = self.cost(self.open_probability()) - self.target_at(step)
        climbing = 2 * self.multipliers.detach() - self.multipliers  # the multipliers' value with the gradient negated
        return climbing[0] * excess + climbing[1] * excess.square()

    def target_at(self, step: int) -> float:
        done = min(1.0, step / self.warmup) if self.warmup else 1.0
        return float(self.begin) + (self.target - float(self.begin)) * done

    def decide(self, least: int = 1) -> dict[str, Tensor]:
        """Returns the kept units, as `keep_best` selects them by their probability of being open."""
        with torch.no_grad():
            return keep_best(self.open_probability(), self.cost, self.target, least)

    def items(self) -> list[tuple[str, Tensor]]:
        return [(name, self.log_alpha[key]) for name, key in self.names.items()]


def logistic_noise(like: Tensor) -> Tensor:
    """Returns logit(u) of uniform u, in the shape of `like`."""
    eps = torch.finfo(like.dtype).eps
    return torch.rand_like(like).clamp(eps, 1 - eps).logit()


def hard_concrete(logits: Tensor) -> Tensor:
    return (torch.sigmoid(logits / TEMPERATURE) * (HIGH - LOW) + LOW).clamp(0, 1)


def mean_gate(log_alpha: Tensor) -> Tensor:
    """Returns E[gate] [units], the integral of P(gate > t) for t from 0 to 1, by 32-point Gauss-Legendre quadrature."""
    points, weights = (torch.from_numpy(part).to(log_alpha) for part in np.polynomial.legendre.leggauss(32))
    cuts = TEMPERATURE * (((points + 1) / 2 - LOW) / (HIGH - LOW)).logit()
    return (torch.sigmoid(log_alpha[:, None] - cuts) * weights / 2).sum(dim=-1)


class Movement(nn.Module):
    """Movement scores of units: how much training pushes each gate up, summed over the steps.

    Pass `gates()` to `Gates.set`, and call `accumulate()` after each backward pass. A closed unit's gate gets a
    gradient too, so a unit can be reopened.

    Args:
        units: Axis name, or `layers` -> number of units.

    Source: Sanh et al. 2020 (arXiv 2005.07683), section 4, on blocks as in Lagunas et al. 2021 (arXiv 2109.04838): the
        sum of -w dL/dw over a unit's weights is -dL/dgate. Without the factor of the learning rate.
    """

    def __init__(self, units: Mapping[str, int]):
        super().__init__()
        self.names = {name: name.replace(".", "-") for name in units}
        for name, size in units.items():
            self.register_buffer(self.names[name], torch.zeros(size))
        self.leaves: dict[str, Tensor] = {}

    def gates(self, kept: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Returns gates [units] that require gradients: 1 for units in `kept` and of axes not in it, 0 for others."""
        self.leaves = {}
        for name, score in self.scores().items():
            gate = torch.ones_like(score)
            if kept is not None and name in kept:
                gate = torch.zeros_like(score).index_fill(0, kept[name].to(score.device), 1.0)
            self.leaves[name] = gate.requires_grad_()
        return self.leaves

    def accumulate(self) -> None:
        """Adds the gradients of the last `gates()` to the scores and clears them."""
        for name, gate in self.leaves.items():
            if gate.grad is not None:
                self.scores()[name].sub_(gate.grad)
                gate.grad = None

    def scores(self) -> dict[str, Tensor]:
        """Returns name -> score of each unit [units]; the lowest are removed first."""
        return {name: self.get_buffer(key) for name, key in self.names.items()}

    def decide(self, cost: Cost, target: float, least: int = 1) -> dict[str, Tensor]:
        """Returns the kept units, as `keep_best` selects them by their scores."""
        return keep_best(self.scores(), cost, target, least)


def keep_best(ranking: Mapping[str, Tensor], cost: Cost, target: float, least: int = 1) -> dict[str, Tensor]:
    """Closes the lowest-ranked units across all axes, as few as bring the cost to the target.

    Args:
        ranking: Axis name, or `layers` -> rank of each unit [units], comparable across axes.
        cost: Cost of gates 0 and 1; must not rise when a unit is closed.
        target: Cost to reach.
        least: Minimum number of units of each axis (and of layers) to keep.

    Returns:
        Name -> indices of the kept units, ascending.

    Raises:
        CompressError: The target can't be reached.
    """
    units = [
        (float(rank), name, unit)
        for name, ranks in ranking.items()
        for unit, rank in sorted(enumerate(ranks.tolist()), key=lambda pair: (pair[1], pair[0]))[: len(ranks) - least]
    ]
    units.sort(key=lambda entry: entry[0])

    def gates(closed: int) -> dict[str, Tensor]:
        left = {name: torch.ones_like(ranks) for name, ranks in ranking.items()}
        for _, name, unit in units[:closed]:
            left[name][unit] = 0
        return left

    enough = target * (1 + 1e-6)  # costs are float32
    if (lowest := float(cost(gates(len(units))))) > enough:
        raise CompressError(f"target {target}: with {least} of each axis left the cost is still {lowest:.4g}")
    low, high = 0, len(units)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if float(cost(gates(middle))) <= enough else (middle + 1, high)
    return {name: gate.nonzero().flatten() for name, gate in gates(high).items()}


def parameter_share(model: PreTrainedModel, axes: Sequence[Axis]) -> Cost:
    """Returns a cost function: the share of weights left, of those in layers or with a dimension on an axis.

    A weight's expected part is the product of the mean openness of its axes and of its layer. This is exact if they are
    sampled independently, except for weights that one axis runs through twice. Missing names count as open.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    on: dict[Tensor, dict[tuple[str, int], None]] = {}  # a tied weight counts once, under any of its names
    for axis in axes:
        for slot in axis.slots:
            on.setdefault(names[slot.parameter], {})[axis.name, slot.dim] = None
    stack = find_layer_stack(model) + "."
    counts: dict[tuple[tuple[str, ...], int | None], int] = {}
    for name, weight in model.named_parameters():
        layer = int(name.removeprefix(stack).split(".")[0]) if name.startswith(stack) else None
        if weight in on or layer is not None:
            key = (tuple(axis_name for axis_name, _ in on.get(weight, ())), layer)
            counts[key] = counts.get(key, 0) + weight.numel()
    whole = sum(counts.values())

    def share(open_units: Open) -> Tensor:
        means = {name: gate.mean() for name, gate in open_units.items()}
        layers = open_units.get(LAYERS)
        total = torch.zeros((), device=next(iter(open_units.values())).device)
        for (crossing, layer), count in counts.items():
            part = total.new_tensor(count / whole)
            for name in crossing:
                part = part * means.get(name, 1.0)
            total = total + (part if layers is None or layer is None else part * layers[layer])
        return total

    return share
