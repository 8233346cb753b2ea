"""Schedules of the learning rate."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from distill.train.config import TrainConfig
from distill.train.optimizer import set_rate

# Schedule -> share of the peak rate, from the share of the training after the warm-up that remains.
_SHAPES: dict[str, Callable[[float, TrainConfig], float]] = {
    "linear": lambda remaining, config: remaining,
    "find": lambda remaining, config: remaining,
    "cosine": lambda remaining, config: _rise_cosine(remaining),
    "constant": lambda remaining, config: 1.0,
    "polynomial": lambda remaining, config: remaining**config.power,
    "restarts": lambda remaining, config: _rise_cosine(1 - (1 - remaining) * config.cycles % 1),
    "stable": lambda remaining, config: 1 - math.sqrt(max(0.0, 1 - remaining / config.decay_share)),
    "plateau": lambda remaining, config: 1.0,
}


def build_schedule(
    optimizer: Optimizer, config: TrainConfig, steps: int, find_factor: Callable[[], float] = lambda: 1.0
) -> LambdaLR:
    """Returns a schedule of `steps` steps: linear warm-up, then the decay chosen in the config.

    Args:
        optimizer: Its groups' rates are the peak rates.
        config: Shape of the decay, which ends at `min_rate`.
        steps: Optimizer steps of the entire training.
        find_factor: Returns a factor that multiplies the rate from the next step on.

    Source: restarts as in Loshchilov and Hutter 2016, SGDR (arXiv 1608.03983), in cycles of equal length; stable as in
        Hägele et al. 2024 (arXiv 2405.18392), with the decay 1 - √ that they found best.
    """
    config = config.resolve()
    warmup = max(1, math.ceil(config.warmup * steps)) if config.warmup else 0
    shape = _SHAPES[config.schedule]

    def compute_factor(step: int) -> float:
        if step < warmup:
            return find_factor() * (step + 1) / (warmup + 1)
        remaining = max(0.0, (steps - step) / max(1, steps - warmup))
        return find_factor() * (config.min_rate + (1 - config.min_rate) * shape(remaining, config))

    return LambdaLR(optimizer, compute_factor)


def set_schedule_step(schedule: LambdaLR, step: int) -> None:
    """Moves a schedule to a step, and gives the optimizer the rates of that step."""
    schedule.last_epoch = step
    for group, base, factor in zip(
        schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        set_rate(group, float(base) * factor(step))


def _rise_cosine(share: float) -> float:
    """Returns half a cosine wave from 0 at 0 to 1 at 1."""
    return (1 - math.cos(math.pi * share)) / 2
