"""AdamW and its learning-rate schedule."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from distill.train.config import TrainConfig


def build_optimizer(
    student: PreTrainedModel,
    extra: Iterable[nn.Parameter],
    config: TrainConfig,
    *,
    shard: bool = False,
    make: Callable[..., Optimizer] | None = None,
) -> Optimizer:
    """Returns AdamW with weight decay on matrices only and a separate learning rate for the head.

    Args:
        student: The model; only parameters that require gradients are trained.
        extra: Parameters outside the student that are trained with it.
        config: Learning rates and weight decay.
        shard: Each process of the world stores the optimizer state of a part of the parameters and broadcasts its
            updates (ZeRO-1).
        make: Called with the parameter groups and `lr` instead of AdamW.
    """
    body = {id(p) for p in student.base_model.parameters()}
    groups: dict[tuple[float, float, DeviceMesh | None], list[nn.Parameter]] = {}
    for p in [*student.parameters(), *extra]:
        if p.requires_grad:
            rate = config.learning_rate if id(p) in body else config.learning_rate * config.head_rate
            # One fused call can't update tensors on different meshes, or DTensors together with plain tensors.
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            groups.setdefault((rate, config.weight_decay if p.dim() > 1 else 0.0, mesh), []).append(p)
    settings = [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay, _), params in groups.items()]
    if make is not None:
        return make(settings, lr=config.learning_rate)
    if shard:
        return ZeroRedundancyOptimizer(settings, optimizer_class=AdamW, lr=config.learning_rate, fused=True)
    return AdamW(settings, lr=config.learning_rate, fused=True)


def build_schedule(optimizer: Optimizer, config: TrainConfig, steps: int) -> LambdaLR:
    """Returns a schedule of `steps` steps: linear warm-up, then the decay chosen in the config."""
    warmup = max(1, math.ceil(config.warmup * steps)) if config.warmup else 0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        remaining = max(0.0, (steps - step) / max(1, steps - warmup))
        decay = {"linear": remaining, "cosine": (1 - math.cos(math.pi * remaining)) / 2, "constant": 1.0}
        return decay[config.schedule]

    return LambdaLR(optimizer, factor)


def set_dropout(model: nn.Module, rate: float) -> None:
    """Sets the rate of every dropout layer of the model; its config keeps the original rate."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
