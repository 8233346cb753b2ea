"""Memory and time of training steps, measured before a training on its longest rows."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from compress.measure.memory import read_peak_memory, reset_peak_memory, return_freed_memory
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Batch
from distill.train.module import DistillationModule
from distill.train.optimizer import take_empty_step
from pipelines.runs.memory_budget import read_held_memory


@dataclass(frozen=True)
class PassCost:
    """What the forward and backward pass of a micro-batch takes.

    Args:
        first: Bytes at most above those before, if no gradients exist before; those of the gradients included.
        later: Bytes at most above those before, if all gradients exist before.
        seconds: Time of a pass.
    """

    first: int
    later: int
    seconds: float


@dataclass(frozen=True)
class OptimizerCost:
    """What an optimizer's step takes.

    Args:
        states: Bytes that the optimizer keeps.
        peak: Bytes at most in a step that creates them, those of the states included.
        seconds: Time of a later step.
    """

    states: int
    peak: int
    seconds: float


@contextmanager
def train_temporarily(module: DistillationModule, checkpointing: str) -> Iterator[None]:
    """Puts the module into the mode of its training, and takes back what passes in it change."""
    config, device = module.train_config, find_device(module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train_config = replace(config, checkpointing=checkpointing)
    module.on_fit_start()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    module.on_fit_end()
    module.train_config = config
    module.zero_grad()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def measure_pass(module: DistillationModule, batch: Batch) -> PassCost:
    """Returns the cost of a pass, from two passes; leaves the gradients behind."""
    device = find_device(module)

    def run_pass() -> None:
        module.compute_loss(batch)[0].backward()

    module.zero_grad()
    first = measure_call(run_pass, device)
    later = measure_call(run_pass, device)
    return PassCost(first.peak, later.peak, later.seconds)


def measure_optimizer(optimizer: Optimizer, device: torch.device) -> OptimizerCost:
    """Returns the cost of steps at rates of 0, which leave the weights unchanged; the optimizer keeps its states."""
    first = measure_call(lambda: take_empty_step(optimizer), device)
    later = measure_call(lambda: take_empty_step(optimizer), device)
    return OptimizerCost(first.kept, max(first.peak, first.kept + later.peak), later.seconds)


class CallCost(NamedTuple):
    """What a call took: bytes above those before, at most and at the end, and seconds."""

    peak: int
    kept: int
    seconds: float


def measure_call(call: Callable[[], object], device: torch.device) -> CallCost:
    """Calls a function and returns its cost; on a CPU, memory is the resident memory of the process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        return_freed_memory()
        reset_peak_memory()
    before, start = read_held_memory(device), time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, after = time.perf_counter() - start, read_held_memory(device)
    most = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else read_peak_memory()
    return CallCost(most - before, after - before, seconds)


def build_longest_batch(module: DistillationModule, data: RowsDataModule, rows: int) -> Batch:
    """Returns a training batch of the longest `rows` rows, on the module's device."""
    longest = np.argsort(-data.train.lengths, kind="stable")[:rows]
    return move_batch(data.build_train_batches().build_batch((longest, 0)), module)


def move_batch(batch: Batch, module: DistillationModule) -> Batch:
    """Returns the batch on the module's device."""
    moved: Batch = module.transfer_batch_to_device(batch, find_device(module), 0)
    return moved


def find_device(module: DistillationModule) -> torch.device:
    """Returns the device of the student."""
    return next(module.student.parameters()).device
