"""A running average of the weights, kept among the optimizer's states."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

AVERAGE = "average"  # name of a weight's state
_STEPS, _SWAPPED = "averaged_steps", "averages_in_place"  # values of the first group


class WeightAverage:
    """Averages the weights of an optimizer after each of its steps, and exchanges weights and averages.

    The average is `d * average + (1 - d) * weight` with d = min(decay, (1 + steps) / (10 + steps)), so that the first
    weights are soon forgotten. It is among the optimizer's states, so that checkpoints contain it and layouts shard it.
    Weights that have had no gradient yet have no average: they are as they were. Averages are in float32, 4 bytes per
    parameter; while they are exchanged with weights of another dtype, there is also a copy of these.

    Args:
        optimizer: The optimizer; it gets the methods `eval`, after which the weights are the averages, and `train`,
            which undoes it, as an optimizer that averages weights itself has them.
        decay: Share of the old average that is kept in a step, from 0 to below 1.

    Source: Polyak & Juditsky 1992; the decay of the first steps is that of TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, optimizer: Optimizer, decay: float):
        self.optimizer, self.decay = optimizer, decay
        self.trained: dict[Tensor, Tensor] = {}  # by weight, while an average of another dtype is in its place
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
                # float32: in bfloat16 the small steps of the average would be rounded away
                state[AVERAGE] = weight.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def _swap(self, *, to_averages: bool) -> None:
        values = self.optimizer.param_groups[0]
        if bool(values.get(_SWAPPED, False)) == to_averages:
            return
        for weight in _iterate_weights(self.optimizer):
            state = self.optimizer.state[weight]
            if AVERAGE in state:
                self._exchange(weight, state[AVERAGE], to_averages=to_averages)
        values[_SWAPPED] = to_averages

    def _exchange(self, weight: Tensor, average: Tensor, *, to_averages: bool) -> None:
        """Exchanges a weight and its average in place; an average that the weight can't hold exactly stays where it is.

        Without that, the average would come back rounded, and freeze after all.
        """
        if weight.dtype == average.dtype:
            current = weight.detach().clone()
            weight.copy_(average)
            average.copy_(current)
        elif to_averages:
            self.trained[weight] = weight.detach().clone()
            weight.copy_(average)
        else:
            weight.copy_(self.trained.pop(weight))


def set_optimizer_mode(optimizer: Optimizer, mode: Literal["train", "eval"]) -> None:
    """Gives the model the weights that are trained, or their averages; does nothing if the optimizer has none."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


@contextmanager
def use_trained_weights(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Within the context, the student has the weights that are trained, also where it had their averages before."""
    with ExitStack() as restored:
        for optimizer in optimizers:
            if optimizer.param_groups[0].get(_SWAPPED, False):
                set_optimizer_mode(optimizer, "train")
                restored.callback(set_optimizer_mode, optimizer, "eval")
        yield


def _iterate_weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
