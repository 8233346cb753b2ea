"""Construction of the optimizer: its class, its groups of parameters and their learning rates."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_lists
from distill.errors import InputError
from distill.train.averaging import WeightAverage
from distill.train.config import TrainConfig
from distill.train.optimizer_kinds import OPTIMIZERS, check_optimizer_package

_MATRIX_OPTIMIZERS = ("muon", "apollo")  # their groups say whether they contain matrices of layers only

_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("torch.optim", "AdamW", {"fused": True}),
    "adam": ("torch.optim", "Adam", {"fused": True}),
    "sgd": ("torch.optim", "SGD", {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("torch.optim", "Adagrad", {}),
    "adadelta": ("torch.optim", "Adadelta", {}),
    "rmsprop": ("torch.optim", "RMSprop", {}),
    "adamax": ("torch.optim", "Adamax", {}),
    "nadam": ("torch.optim", "NAdam", {"decoupled_weight_decay": True}),
    "radam": ("torch.optim", "RAdam", {"decoupled_weight_decay": True}),
    "adafactor": ("torch.optim", "Adafactor", {}),
    "muon": ("distill.train.muon", "Muon", {}),
    "apollo": ("distill.train.apollo", "Apollo", {}),
    "lamb": ("pytorch_optimizer", "Lamb", {}),
    "lion": ("pytorch_optimizer", "Lion", {}),
    "soap": ("pytorch_optimizer", "SOAP", {}),
    "schedule-free": ("pytorch_optimizer", "ScheduleFreeAdamW", {}),
    "adamw-8bit": ("torchao.optim", "AdamW8bit", {}),
    "adamw-4bit": ("torchao.optim", "AdamW4bit", {}),
    "adamw-fp8": ("torchao.optim", "AdamWFp8", {}),
}
_STOCHASTIC_ADAMW: tuple[str, str, dict[str, Any]] = ("torchao.optim", "_AdamW", {})  # torch's can't round so


class _GroupKey(NamedTuple):
    """What the parameters of a group have in common.

    One fused call can't update tensors on different meshes, or DTensors together with plain tensors.
    """

    rate: float
    decay: float
    matrices: bool
    mesh: DeviceMesh | None


def build_optimizer(
    student: PreTrainedModel,
    extra: Iterable[nn.Parameter],
    config: TrainConfig,
    *,
    shard: bool = False,
    stochastic_rounding: bool = False,
) -> Optimizer:
    """Returns the optimizer with weight decay on matrices only and a separate learning rate for the head.

    Args:
        student: The model; only parameters that require gradients are trained.
        extra: Parameters outside the student that are trained with it.
        config: The optimizer's name, learning rates and weight decay.
        shard: Each process of the world stores the optimizer state of a part of the parameters and broadcasts its
            updates (ZeRO-1).
        stochastic_rounding: The weights are bfloat16, and updates are rounded to them stochastically, so that small
            ones aren't lost: torchao's AdamW, or its low-bit versions.

    Raises:
        InputError: The optimizer is in a package that isn't installed, can't train this layout, or can't round
            stochastically.
    """
    rate = config.peak_rate
    groups = group_parameters(student, extra, config)
    kind, (module, name, settings) = OPTIMIZERS[config.optimizer], _CLASSES[config.optimizer]
    if stochastic_rounding:
        if not kind.stochastic:
            known = ", ".join(each for each, other in OPTIMIZERS.items() if other.stochastic)
            raise InputError(
                f"train.optimizer {config.optimizer}: expected one that rounds bfloat16 weights stochastically "
                f"({known}), found one that would lose small updates"
            )
        module, name, settings = _STOCHASTIC_ADAMW if name == "AdamW" else (module, name, settings)
        settings = {**settings, "bf16_stochastic_round": True}
    is_sharded = any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
    if config.ema_decay and shard:
        raise InputError(
            f"train.ema_decay {config.ema_decay}: expected a student whose optimizer states are on one process, or "
            f"sharded "
            "with its weights, found those of zero1: its processes have no common average"
        )
    if (kind.whole and is_sharded) or (shard and not kind.zero1):
        what = "optimizer states" if shard else "weights"
        raise InputError(
            f"train.optimizer {config.optimizer}: expected a student whose {what} are on one process, found them "
            "sharded; use adamw, or another layout"
        )
    check_optimizer_package(config.optimizer, "train.optimizer")
    optimizer_class = cast(type[Optimizer], getattr(import_module(module), name))
    if shard:
        return ZeroRedundancyOptimizer(groups, optimizer_class=optimizer_class, lr=rate, **settings)
    optimizer = optimizer_class(groups, lr=rate, **settings)  # type: ignore[call-arg]
    if config.ema_decay:
        WeightAverage(optimizer, config.ema_decay)
    return optimizer


def group_parameters(
    student: PreTrainedModel, extra: Iterable[nn.Parameter], config: TrainConfig
) -> list[dict[str, Any]]:
    """Returns the groups of the parameters that require gradients, each with its learning rate and weight decay."""
    body, body_rate = {id(p) for p in student.base_model.parameters()}, config.peak_rate
    separates = config.optimizer in _MATRIX_OPTIMIZERS
    in_layers = {id(p) for name in find_layer_lists(student) for p in student.get_submodule(name).parameters()}
    groups: dict[_GroupKey, list[nn.Parameter]] = {}
    for p in [*student.parameters(), *extra]:
        if p.requires_grad:
            rate = body_rate if id(p) in body else body_rate * config.head_rate
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            is_matrix = separates and id(p) in in_layers and p.dim() == 2
            key = _GroupKey(rate, config.choose_decay() if p.dim() > 1 else 0.0, is_matrix, mesh)
            groups.setdefault(key, []).append(p)
    return [
        {"params": params, "lr": key.rate, "weight_decay": key.decay}
        | ({"matrices": key.matrices} if separates else {})
        for key, params in groups.items()
    ]


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Sets the learning rate of a group in place where it is a tensor: the low-bit optimizers are compiled with it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def take_empty_step(optimizer: Optimizer) -> None:
    """Takes a step at rates of 0, which creates the optimizer's states and leaves the weights unchanged.

    Parameters without gradients have gradients of 0 meanwhile.
    """
    without_gradient = [p for group in optimizer.param_groups for p in group["params"] if p.grad is None]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for parameter in without_gradient:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)
    for parameter in without_gradient:
        parameter.grad = None


def set_dropout(model: nn.Module, rate: float) -> None:
    """Sets the rate of all dropout of the model, in layers and in functions; its config keeps the original rate."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        # Functions get theirs from an attribute, such as `dropout` in OPT and `attention_dropout` in Llama.
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, rate)
