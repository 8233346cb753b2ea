"""Training checkpoints that are independent of the layout: each process reads and writes its own shards.

A checkpoint is a folder with the files of `torch.distributed.checkpoint` and `training.pt`, which is the same on every
process (loops, schedules, callbacks, position in the data). Weights and optimizer states are stored under the
parameters' names in the module, so that a run may resume with other processes and another layout.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import STORAGE_TYPES
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distill.errors import InputError
from distill.train.averaging import use_trained_weights
from distill.train.optimizer import take_empty_step
from pipelines.runs.processes import LostError

TRAINING = "training.pt"
MODEL, STATE = "model", "optimizer"
LightningState: TypeAlias = dict[str, Any]  # what Lightning saves beside the weights
GroupSettings: TypeAlias = dict[str, Any]  # a parameter group without its parameters


def save_training(
    folder: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    rest: Mapping[str, object],
    group: dist.ProcessGroup | None = None,
) -> Future[None]:
    """Writes a checkpoint; every process calls it. The future is done when this process's shards are on disk.

    Where the student has averages of its weights, the checkpoint has the weights that are trained.
    The tensors are copied before this returns, so training may continue immediately. `group` is a gloo group that is
    used for nothing else; without it, the call returns when everything is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with use_trained_weights(map(_unwrap_optimizer, optimizers)):
        tensors = collect_weights(module) | _collect_states(module, optimizers)
        if is_rank_zero():
            torch.save({**rest, "groups": [_read_settings(each) for each in optimizers]}, folder / TRAINING)
        if group is not None:
            return cast(Future[None], dcp.async_save(tensors, checkpoint_id=str(folder), process_group=group))
        with unwrap_errors():
            dcp.save(tensors, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    return completed_future()


def completed_future() -> Future[None]:
    """Returns a future that is already done."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


@contextmanager
def unwrap_errors() -> Iterator[None]:
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


def load_training(folder: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> LightningState:
    """Loads each process's shards into module and optimizers, in place; returns the rest of the checkpoint.

    Raises:
        InputError: The checkpoint is of another model or optimizer, or DeepSpeed wrote it.
    """
    if not (folder / TRAINING).exists():
        raise InputError(
            f"checkpoint {str(folder)!r}: expected {TRAINING}, found none: the training began with another strategy; "
            "pass the same --strategy (machine.strategy) as before, or remove the stage's folder"
        )
    rest: LightningState = torch.load(folder / TRAINING, weights_only=True)
    reader = FileSystemReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    tensors = collect_weights(module)
    missing = [name for name in tensors if name not in stored]
    if missing:
        raise InputError(
            f"checkpoint {str(folder)!r}: expected weights of {missing[0]}, found none (as for {len(missing)} of "
            f"{len(tensors)} tensors): the checkpoint is of another model and training can't resume from it"
        )
    for optimizer in map(_unwrap_optimizer, optimizers):
        take_empty_step(optimizer)  # creates the states that are loaded
        _drop_states(optimizer, _name_parameters(module), stored)
    tensors |= _collect_states(module, optimizers)
    with unwrap_errors():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    for optimizer, groups in zip(optimizers, rest.pop("groups"), strict=True):
        _restore_settings(optimizer, groups)
    _adapt_schedules(rest.get("lr_schedulers", []), optimizers)
    return rest


def save_weights(folder: Path, module: nn.Module) -> None:
    """Writes the weights alone; every process calls it."""
    with unwrap_errors():
        dcp.save(collect_weights(module), checkpoint_id=str(folder), no_dist=not dist.is_initialized())


def load_weights(folder: Path, module: nn.Module) -> None:
    """Loads each process's shards of the weights into the module, in place."""
    with unwrap_errors():
        dcp.load(collect_weights(module), checkpoint_id=str(folder), no_dist=True)


def is_rank_zero() -> bool:
    """Returns whether this process is the first of the process group, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def collect_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a module under their names in a checkpoint."""
    return {f"{MODEL}.{name}": value for name, value in collect_untied(module).items()}


def collect_untied(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name; a tied tensor occurs once, under the first of its names."""
    seen: set[int] = set()
    tensors = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()
    return tensors


def _name_parameters(module: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def _unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that holds the states, without the wrappers of Lightning and ZeRO-1."""
    unwrapped = getattr(optimizer, "optimizer", optimizer)
    return cast(Optimizer, getattr(unwrapped, "optim", unwrapped))


def _collect_states(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    names = _name_parameters(module)
    return {
        f"{STATE}.{names[parameter]}.{key}": tensor
        for optimizer in optimizers
        for parameter, state in _unwrap_optimizer(optimizer).state.items()
        for name, value in state.items()
        for key, tensor in flatten_state(name, value)
    }


def flatten_state(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the plain or sharded tensors of an optimizer state: its own, a list's, or those of a low-bit tensor."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from flatten_state(f"{name}[{number}]", each)
    elif isinstance(value, Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__"):
        for part in value.__tensor_flatten__()[0]:
            yield f"{name}~{part}", getattr(value, part)
    elif isinstance(value, Tensor):
        yield name, value


def _drop_states(optimizer: Optimizer, names: Mapping[Tensor, str], stored: Mapping[str, STORAGE_TYPES]) -> None:
    """Removes the states of parameters that have none in the checkpoint, because they haven't been trained yet.

    Raises:
        InputError: A parameter has states of another optimizer.
    """
    trained = {key.rpartition(".")[0] for key in stored if key.startswith(f"{STATE}.")}
    for parameter in list(optimizer.state):
        prefix = f"{STATE}.{names[parameter]}"
        keys = [key for name, value in optimizer.state[parameter].items() for key, _ in flatten_state(name, value)]
        if all(f"{prefix}.{key}" in stored for key in keys):
            continue
        if prefix in trained:
            raise InputError(
                f"checkpoint: expected the {', '.join(keys)} of {names[parameter]}, found the states of another "
                "optimizer: training can't go on with this one; pass the same machine.memory and optimizer as before, "
                "or remove the stage's folder"
            )
        del optimizer.state[parameter]


def _adapt_schedules(schedules: Iterable[LightningState], optimizers: Iterable[Optimizer]) -> None:
    """Adapts schedules to the number of parameter groups, which may differ between layouts."""
    for state, optimizer in zip(schedules, optimizers, strict=False):
        groups = optimizer.param_groups
        rates = {"base_lrs": [g["initial_lr"] for g in groups], "_last_lr": [g["lr"] for g in groups]}
        state.update({name: rate for name, rate in rates.items() if name in state})
        if "lr_lambdas" in state:
            state["lr_lambdas"] = [None] * len(groups)


def _read_settings(optimizer: Optimizer) -> list[GroupSettings]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


_IDENTITY = ("initial_lr", "weight_decay", "matrices")  # the settings that no two groups of a process share


def _restore_settings(optimizer: Optimizer, groups: list[GroupSettings]) -> None:
    """Restores each group's settings from a saved group with the same initial values; a stage may have fewer groups."""
    for group in optimizer.param_groups:
        alike = [saved for saved in groups if all(saved.get(key) == group.get(key) for key in _IDENTITY)]
        group.update(alike[0] if alike else {})
