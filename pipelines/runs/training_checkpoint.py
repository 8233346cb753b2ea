"""Training checkpoints that are independent of the layout: each process reads and writes its own shards.

A checkpoint is a folder with the files of `torch.distributed.checkpoint` and `training.pt`, which is the same on every
process (loops, schedules, callbacks, position in the data). Weights and optimizer states are stored under the
parameters' names in the module, so that a run may resume with other processes and another layout.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.optim import Optimizer

from distill.errors import InputError
from pipelines.runs.processes import LostError

TRAINING = "training.pt"
MODEL, STATE = "model", "optimizer"


def save_training(
    folder: Path, module: nn.Module, optimizers: Iterable[Optimizer], rest: Mapping[str, Any], group: Any = None
) -> Future[Any]:
    """Writes a checkpoint; every process calls it. The future is done when this process's shards are on disk.

    The tensors are copied before this returns, so training may continue immediately. `group` is a gloo group that is
    used for nothing else; without it, the call returns when everything is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = model_tensors(module) | optimizer_tensors(module, optimizers)
    if is_rank_zero():
        torch.save({**rest, "groups": [settings_of(each) for each in optimizers]}, folder / TRAINING)
    if group is not None:
        return dcp.async_save(tensors, checkpoint_id=str(folder), process_group=group)  # type: ignore[return-value]
    with plain_errors():
        dcp.save(tensors, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    done: Future[Any] = Future()
    done.set_result(None)
    return done


@contextmanager
def plain_errors() -> Iterator[None]:
    """Replaces exceptions of `torch.distributed.checkpoint`, which are raised on every process.

    The process that failed raises its own error, the others a `LostError`.
    """
    try:
        yield
    except CheckpointException as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank in error.failures:
            raise error.failures[rank][0] from None
        raise LostError(f"process {min(error.failures, default=0)} couldn't write its part of a checkpoint") from error


def load_training(folder: Path, module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Loads each process's shards into module and optimizers, in place; returns the rest of the checkpoint.

    Raises:
        InputError: The checkpoint is of another model.
    """
    rest: dict[str, Any] = torch.load(folder / TRAINING, weights_only=True)
    reader = FileSystemReader(str(folder))
    held = reader.read_metadata().state_dict_metadata
    wanted = model_tensors(module)
    absent = [name for name in wanted if name not in held]
    if absent:
        raise InputError(
            f"checkpoint {str(folder)!r}: holds nothing for {absent[0]} ({len(absent)} such): it is of another model"
        )
    states = empty_states(module, optimizers, held)
    wanted |= {name: value for parts in states.values() for name, value in parts.items()}
    with plain_errors():
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    for optimizer, groups in zip(optimizers, rest.pop("groups"), strict=True):
        restore_settings(optimizer, groups)
    restore_states(optimizers, states)
    fit_schedules(rest.get("lr_schedulers", []), optimizers)
    return rest


def save_weights(folder: Path, module: nn.Module) -> None:
    """Writes the weights alone; every process calls it."""
    with plain_errors():
        dcp.save(model_tensors(module), checkpoint_id=str(folder), no_dist=not dist.is_initialized())


def load_weights(folder: Path, module: nn.Module) -> None:
    with plain_errors():
        dcp.load(model_tensors(module), checkpoint_id=str(folder), no_dist=True)


def is_rank_zero() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {f"{MODEL}.{name}": value for name, value in untied(module).items()}


def untied(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name; a tied tensor occurs once, under the first of its names."""
    seen: set[int] = set()
    found = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[name] = value.detach()
    return found


def names_of(module: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def inner(optimizer: Any) -> Optimizer:
    """Returns the optimizer that holds the states, without the wrappers of Lightning and ZeRO-1."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return getattr(optimizer, "optim", optimizer)


def optimizer_tensors(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    names = names_of(module)
    return {
        f"{STATE}.{names[parameter]}.{key}": value
        for optimizer in optimizers
        for parameter, state in inner(optimizer).state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def empty_states(
    module: nn.Module, optimizers: Iterable[Optimizer], held: Mapping[str, Any]
) -> dict[Tensor, dict[str, Tensor]]:
    """Returns empty tensors for all states in the checkpoint of this process's parameters, sharded like these."""
    names, found = names_of(module), {}
    for optimizer in optimizers:
        for group in inner(optimizer).param_groups:
            for parameter in group["params"]:
                prefix = f"{STATE}.{names[parameter]}."
                keys = [name for name in held if name.startswith(prefix) and "." not in name[len(prefix) :]]
                found[parameter] = {key: room_for(parameter, held[key]) for key in keys}
    return found


def room_for(parameter: Tensor, wanted: Any) -> Tensor:
    if tuple(wanted.size) == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=wanted.properties.dtype)
    return torch.zeros(wanted.size, dtype=wanted.properties.dtype)


def fit_schedules(schedules: Iterable[dict[str, Any]], optimizers: Iterable[Optimizer]) -> None:
    """Adapts schedules to the number of parameter groups, which may differ between layouts."""
    for state, optimizer in zip(schedules, optimizers, strict=False):
        groups = optimizer.param_groups
        rates = {"base_lrs": [g["initial_lr"] for g in groups], "_last_lr": [g["lr"] for g in groups]}
        state.update({name: rate for name, rate in rates.items() if name in state})
        if "lr_lambdas" in state:
            state["lr_lambdas"] = [None] * len(groups)


def restore_states(optimizers: Iterable[Optimizer], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    for optimizer in optimizers:
        own = inner(optimizer)
        for group in own.param_groups:
            for parameter in group["params"]:
                if states.get(parameter):
                    own.state[parameter] = {name.rpartition(".")[2]: value for name, value in states[parameter].items()}


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def restore_settings(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Restores each group's settings from a saved group with the same initial values; a stage may have fewer groups."""
    for group in optimizer.param_groups:
        alike = [g for g in groups if all(g.get(k) == group.get(k) for k in ("initial_lr", "weight_decay"))]
        group.update(alike[0] if alike else {})
