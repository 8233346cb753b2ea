"""Balancing of term weights so that each term contributes its requested share of the gradient norm."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypedDict

from torch import Tensor

from distill.losses.compose import compute_balance_factors, compute_gradient_norms
from distill.losses.config import LossConfig


class BalanceState(TypedDict):
    """The state of a `GradientBalance` in a training checkpoint."""

    factors: dict[str, float]
    set_at: int


class GradientBalance:
    """Factors on the term weights, updated every `interval` steps; disabled where `interval` is 0."""

    def __init__(self, interval: int):
        self.interval, self.last_step = interval, -1
        self.factors: dict[str, float] = {}

    def update(
        self, step: int, terms: Mapping[str, Tensor], parameters: Iterable[Tensor], mean: Callable[[float], float]
    ) -> None:
        """Updates the factors from the gradients of one batch, in the steps in which they are due.

        Args:
            step: Optimizer step; further batches of the same step change nothing.
            terms: Unweighted values with an autograd graph.
            parameters: Parameters whose gradients are measured.
            mean: Averages a norm over the processes.
        """
        if not self.interval or len(terms) < 2 or step % self.interval or step == self.last_step:
            return
        norms = {name: mean(norm) for name, norm in compute_gradient_norms(terms, parameters).items()}
        self.factors, self.last_step = compute_balance_factors(norms, self.factors), step

    def scale_weights(self, loss: LossConfig) -> LossConfig:
        """Returns the settings with the weights multiplied by the factors."""
        weights = {name: getattr(loss, name) * factor for name, factor in self.factors.items()}
        return replace(loss, **weights) if weights else loss

    def state_dict(self) -> BalanceState:
        """Returns the state that a resumed training continues from."""
        return {"factors": dict(self.factors), "set_at": self.last_step}

    def load_state_dict(self, state: BalanceState) -> None:
        """Restores the state of `state_dict`."""
        self.factors, self.last_step = dict(state["factors"]), int(state["set_at"])
