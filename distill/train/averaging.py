"""A running average of the weights, kept among the optimizer's states."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

AVERAGE = "average"  # name of a weight's state
_STEPS, _SWAPPED = "averaged_steps", "averages_in_place"  # values of the first group


class WeightAverage:
    """Averages the weights of an optimizer after each of its steps, and exchanges weights and averages.

    The average is `d * average + (1 - d) * weight` with d = min(decay, (1 + steps) / (10 + steps)), so that the first
    weights are soon forgotten. It is among the optimizer's states, so that checkpoints contain it and layouts shard it.
    Weights that have had no gradient yet have no average: they are as they were.

    Args:
        optimizer: The optimizer; it gets the methods `eval`, after which the weights are the averages, and `train`,
            which undoes it, as an optimizer that averages weights itself has them.
        decay: Share of the old average that is kept in a step, from 0 to below 1.

    Source: Polyak & Juditsky 1992; the decay of the first steps is that of TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, optimizer: Optimizer, decay: float):
        self.optimizer, self.decay = optimizer, decay
        optimizer.register_step_post_hook(self._update)
        optimizer.train, optimizer.eval = self.train, self.eval  # type: ignore[attr-defined]

    def train(self) -> None:
        """Gives the student the weights that are trained."""
        self._swap(to_averages=False)

    def eval(self) -> None:
        """Gives the student the averages."""
        self._swap(to_averages=True)

    @torch.no_grad()
    def _update(self, optimizer: Optimizer, *call: Any) -> None:
        values = optimizer.param_groups[0]
        steps = values[_STEPS] = int(values.get(_STEPS, 0)) + 1
        decay = min(self.decay, (1 + steps) / (10 + steps))
        for weight in _iterate_weights(optimizer):
            state = optimizer.state[weight]
            if AVERAGE in state:
                state[AVERAGE].mul_(decay).add_(weight, alpha=1 - decay)
            elif weight.grad is not None:
                state[AVERAGE] = weight.detach().clone()

    @torch.no_grad()
    def _swap(self, *, to_averages: bool) -> None:
        values = self.optimizer.param_groups[0]
        if bool(values.get(_SWAPPED, False)) == to_averages:
            return
        for weight in _iterate_weights(self.optimizer):
            state = self.optimizer.state[weight]
            if AVERAGE in state:
                current = weight.detach().clone()
                weight.copy_(state[AVERAGE])
                state[AVERAGE].copy_(current)
        values[_SWAPPED] = to_averages


def _iterate_weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
