"""Balancing of term weights so that each term contributes its requested share of the gradient norm."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from distill.losses.compose import balanced, gradient_norms
from distill.losses.config import LossConfig


class Balance:
    """Factors on the term weights, updated every `every` steps; disabled where `every` is 0."""

    def __init__(self, every: int):
        self.every, self.set_at = every, -1
        self.factors: dict[str, float] = {}

    def update(
        self, step: int, terms: Mapping[str, Tensor], parameters: Iterable[Tensor], mean: Callable[[float], float]
    ) -> None:
        """Updates the factors from the gradients of one batch; `mean` averages a norm over the processes."""
        if not self.every or len(terms) < 2 or step % self.every or step == self.set_at:
            return
        norms = {name: mean(norm) for name, norm in gradient_norms(terms, parameters).items()}
        self.factors, self.set_at = balanced(norms, self.factors), step

    def scaled(self, loss: LossConfig) -> LossConfig:
        weights = {name: getattr(loss, name) * factor for name, factor in self.factors.items()}
        return replace(loss, **weights) if weights else loss

    def state_dict(self) -> dict[str, Any]:
        return {"factors": dict(self.factors), "set_at": self.set_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.factors, self.set_at = dict(state["factors"]), int(state["set_at"])
