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
from compress.measure.precision_speed import autocast_to_mode
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Batch
from distill.train.config import Offload
from distill.train.module import DistillationModule
from distill.train.optimizer import take_empty_step
from pipelines.runs.memory.budget import read_held_memory


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


@contextmanager
def train_temporarily(module: DistillationModule, checkpointing: str, offload: Offload) -> Iterator[None]:
    """Puts the module into the mode of its training, and takes back what passes in it change."""
    config, device = module.train_config, find_device(module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train_config = replace(config, checkpointing=checkpointing, offload=offload)
    module.on_fit_start()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    module.on_fit_end()
    module.train_config = config
    module.zero_grad()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def measure_in_training(
    module: DistillationModule, batch: Batch, checkpointing: str, offload: Offload = "none", precision: str = "32"
) -> PassCost:
    """Returns the cost of a pass in a way to train, from two passes; the module stays as it is.

    Args:
        module: The training.
        batch: The micro-batch.
        checkpointing: Mode of activation checkpointing.
        offload: What is offloaded.
        precision: Name of the precision.
    """
    device = find_device(module)

    def run_pass() -> None:
        for part in module.divide_batch(batch):
            with autocast_to_mode(precision, device):
                loss = module.compute_loss(part)[0]
            loss.backward()

    with train_temporarily(module, checkpointing, offload):
        module.zero_grad()
        first = measure_call(run_pass, device)
        later = measure_call(run_pass, device)
    return PassCost(first.peak, later.peak, later.seconds)


def measure_optimizer(optimizer: Optimizer, device: torch.device) -> tuple[int, int]:
    """Returns the bytes that an optimizer keeps, and those at most in a step that creates them.

    It takes steps at rates of 0, which leave the weights unchanged, and keeps its states.
    """
    first = measure_call(lambda: take_empty_step(optimizer), device)
    later = measure_call(lambda: take_empty_step(optimizer), device)
    return first.kept, max(first.peak, first.kept + later.peak)


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
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else read_peak_memory()
    return CallCost(peak - before, after - before, seconds)


class LongestRows:
    """The longest training rows, from which micro-batches are built on the module's device.

    Args:
        module: The training.
        data: Its rows.
        count: Number of rows.
    """

    def __init__(self, module: DistillationModule, data: RowsDataModule, count: int):
        self.module, self.batches = module, data.build_train_batches()
        self.rows = np.argsort(-data.train.lengths, kind="stable")[:count]

    def __len__(self) -> int:
        return len(self.rows)

    def build_batch(self, rows: int) -> Batch:
        """Returns a training batch of the longest `rows` rows."""
        batch = self.batches.build_batch((self.rows[:rows], 0, 0))
        moved: Batch = self.module.transfer_batch_to_device(batch, find_device(self.module), 0)
        return moved


def find_device(module: DistillationModule) -> torch.device:
    """Returns the device of the student."""
    return next(module.student.parameters()).device
