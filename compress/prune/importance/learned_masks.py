"""Masks trained beside the weights: hard-concrete gates with a Lagrangian size constraint, and movement scores."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from compress.errors import CompressError

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1  # of the hard-concrete distribution (Louizos et al. 2018, section 4)
# A gate is exactly 0 if logit(noise) + log_alpha is below this.
CLOSED_LOGIT = TEMPERATURE * math.log(-LOW / HIGH)

Openness = Mapping[str, Tensor]  # axis name, or `layers` -> openness of each unit, 0 to 1, [units]
Cost = Callable[[Openness], Tensor]  # openness of units -> cost of the model, a scalar in the target's unit


class LearnedMasks(nn.Module):
    """Hard-concrete gates, and the penalty that drives their expected cost to a target.

    Train the parameters beside the weights with one minimizing optimizer (the multipliers' gradients are reversed, so
    they ascend) in groups without weight decay, which would pull gates open or shut. Add `compute_penalty(step)` to the
    loss, and pass each step's `sample()` to `Gates.set`.

    Args:
        units: Axis name, or `layers` -> number of units: `Gates.sizes`, or some of its entries.
        cost: Expected cost as a function of the probabilities of being open.
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
        self._keys = {name: name.replace(".", "-") for name in units}  # parameter names must not contain dots
        log_alpha = math.log(start / (1 - start)) + CLOSED_LOGIT
        initial = {self._keys[name]: torch.full((size,), log_alpha) for name, size in units.items()}
        self.log_alpha = nn.ParameterDict({key: nn.Parameter(value) for key, value in initial.items()})
        self.multipliers = nn.Parameter(torch.zeros(2))
        self.cost, self.target, self.warmup = cost, target, warmup
        with torch.no_grad():
            self.register_buffer("begin", cost(self.compute_open_probability()).detach().float().clone())
        if not 0 < target <= float(self.begin):
            raise CompressError(
                f"target: expected more than 0 and at most the initial cost of {float(self.begin):.4g}, found "
                f"{target}: no unit would have to be closed"
            )

    def sample(self) -> dict[str, Tensor]:
        """Samples gates [units] with torch's generator: exactly 0 or 1 with some probability, otherwise in between."""
        return {
            name: compute_hard_concrete(sample_logistic_noise(log_alpha) + log_alpha)
            for name, log_alpha in self.get_log_alphas()
        }

    def compute_mean_gates(self) -> dict[str, Tensor]:
        """Returns the mean of `sample()` [units]: gates for a deterministic forward pass."""
        return {name: compute_mean_gate(log_alpha) for name, log_alpha in self.get_log_alphas()}

    def compute_open_probability(self) -> dict[str, Tensor]:
        """Returns the probability that a sampled gate isn't 0, [units]."""
        return {name: torch.sigmoid(log_alpha - CLOSED_LOGIT) for name, log_alpha in self.get_log_alphas()}

    def compute_penalty(self, step: int) -> Tensor:
        """Returns l1 (c - t) + l2 (c - t)^2 of the expected cost c and the step's target t; multipliers l ascend."""
        excess = self.cost(self.compute_open_probability()) - self.get_target(step)
        ascending = 2 * self.multipliers.detach() - self.multipliers  # the same value with a negated gradient
        return ascending[0] * excess + ascending[1] * excess.square()

    def get_target(self, step: int) -> float:
        """Returns the target cost at a step, which falls linearly during the warm-up."""
        progress = min(1.0, step / self.warmup) if self.warmup else 1.0
        return float(self.begin) + (self.target - float(self.begin)) * progress

    def get_log_alphas(self) -> list[tuple[str, Tensor]]:
        """Returns (name, log alpha of each gate [units]) of every axis."""
        return [(name, self.log_alpha[key]) for name, key in self._keys.items()]


def sample_logistic_noise(template: Tensor) -> Tensor:
    """Returns logit(u) of uniform u, in the shape and dtype of `template`."""
    eps = torch.finfo(template.dtype).eps
    return torch.rand_like(template).clamp(eps, 1 - eps).logit()


def compute_hard_concrete(logits: Tensor) -> Tensor:
    """Returns the gates, 0 to 1, of logits that include the noise: a stretched sigmoid, clamped."""
    return (torch.sigmoid(logits / TEMPERATURE) * (HIGH - LOW) + LOW).clamp(0, 1)


def compute_mean_gate(log_alpha: Tensor) -> Tensor:
    """Returns E[gate] [units], the integral of P(gate > t) for t from 0 to 1, by 32-point Gauss-Legendre quadrature."""
    points, weights = (torch.from_numpy(array).to(log_alpha) for array in np.polynomial.legendre.leggauss(32))
    thresholds = TEMPERATURE * (((points + 1) / 2 - LOW) / (HIGH - LOW)).logit()
    return (torch.sigmoid(log_alpha[:, None] - thresholds) * weights / 2).sum(dim=-1)


class MovementScores(nn.Module):
    """Movement scores of units: how much training pushes each gate up, summed over the steps.

    Pass `make_gates()` to `Gates.set`, and call `accumulate()` after each backward pass. A closed unit's gate gets a
    gradient too, so a unit can be reopened.

    Args:
        units: Axis name, or `layers` -> number of units.

    Source: Sanh et al. 2020 (arXiv 2005.07683), section 4, on blocks as in Lagunas et al. 2021 (arXiv 2109.04838): the
        sum of -w dL/dw over a unit's weights is -dL/dgate. Without the factor of the learning rate.
    """

    def __init__(self, units: Mapping[str, int]):
        super().__init__()
        self._keys = {name: name.replace(".", "-") for name in units}
        for name, size in units.items():
            self.register_buffer(self._keys[name], torch.zeros(size))
        self._gates: dict[str, Tensor] = {}

    def make_gates(self, kept_units: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Returns gates [units] with gradients: 1 for units in `kept_units` and of axes not in it, 0 for others."""
        self._gates = {}
        for name, score in self.scores().items():
            gate = torch.ones_like(score)
            if kept_units is not None and name in kept_units:
                gate = torch.zeros_like(score).index_fill(0, kept_units[name].to(score.device), 1.0)
            self._gates[name] = gate.requires_grad_()
        return self._gates

    def accumulate(self) -> None:
        """Adds the gradients of the last `make_gates()` to the scores and clears them."""
        for name, gate in self._gates.items():
            if gate.grad is not None:
                self.scores()[name].sub_(gate.grad)
                gate.grad = None

    def scores(self) -> dict[str, Tensor]:
        """Returns name -> score of each unit [units]; the lowest are removed first."""
        return {name: self.get_buffer(key) for name, key in self._keys.items()}
