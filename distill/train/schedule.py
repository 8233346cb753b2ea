"""Schedules of the learning rate."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from distill.train.config import TrainConfig


def build_schedule(optimizer: Optimizer, config: TrainConfig, steps: int) -> LambdaLR:
    """Returns a schedule of `steps` steps: linear warm-up, then the decay chosen in the config."""
    schedule = config.resolve().schedule
    warmup = max(1, math.ceil(config.warmup * steps)) if config.warmup else 0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        remaining = max(0.0, (steps - step) / max(1, steps - warmup))
        decay = {"linear": remaining, "cosine": (1 - math.cos(math.pi * remaining)) / 2, "constant": 1.0}
        return decay[schedule]

    return LambdaLR(optimizer, factor)
