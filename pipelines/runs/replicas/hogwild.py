"""Processes that update the same weights without waiting for each other or locking them (Hogwild).

The weights are in a file that every process maps into its memory. Each process has an optimizer of its own, and claims
the next batch of the training when it is done with the last one, so that a slow process takes fewer.

Source: Niu et al. 2011, Hogwild! (arXiv 1106.5730), where single coordinates are updated; here, as in PyTorch's own
example, whole gradients are, and updates of the same weight at the same moment may be lost.
"""

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from distill.train.schedule import set_schedule_step
from pipelines.runs.replicas.replica import Outcome, Replica, list_trained

WEIGHTS_FILE, CLAIMS_FILE = "weights.f32", "claims.i64"
_BYTES = 8  # of a count


class SharedWeights:
    """The trained weights of a module in a mapped file, in float32.

    Args:
        folder: Where the file is.
        module: The module.
    """

    def __init__(self, folder: Path, module: nn.Module):
        self.file = folder / WEIGHTS_FILE
        self.parameters = list_trained(module)

    def create(self) -> None:
        """Writes the module's weights, unless an earlier start of the run did."""
        if not self.file.exists():
            partial = self.file.with_suffix(".partial")
            flat = torch.cat([each.detach().float().flatten() for each in self.parameters])
            flat.numpy().tofile(partial)
            partial.replace(self.file)

    def attach(self) -> None:
        """Makes the module's parameters views of the file, which all processes read and write."""
        for parameter, shared in self._split():
            parameter.data = shared

    def read(self) -> None:
        """Copies the weights into the module."""
        with torch.no_grad():
            for parameter, shared in self._split():
                parameter.copy_(shared)

    def _split(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        sizes = [each.numel() for each in self.parameters]
        flat = torch.from_file(str(self.file), shared=True, size=sum(sizes), dtype=torch.float32)
        parts = (part.view_as(each) for part, each in zip(flat.split(sizes), self.parameters, strict=True))
        return zip(self.parameters, parts, strict=True)


class SharedCounter:
    """A counter in a file, which survives the processes that take from it."""

    def __init__(self, folder: Path):
        self.handle = os.open(folder / CLAIMS_FILE, os.O_RDWR | os.O_CREAT, 0o644)

    def take(self) -> int:
        """Returns the next number, which no other call returns."""
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        try:
            number = self.read()
            os.pwrite(self.handle, (number + 1).to_bytes(_BYTES, "little"), 0)
        finally:
            fcntl.flock(self.handle, fcntl.LOCK_UN)
        return number

    def read(self) -> int:
        """Returns how many numbers were taken."""
        return int.from_bytes(os.pread(self.handle, _BYTES, 0), "little")


class SharedProgress(Callback):
    """Callback of a process that trains shared weights: the learning rate follows the steps of all processes.

    Args:
        replica: This process.
        counter: Counts the steps that were claimed.
    """

    def __init__(self, replica: Replica, counter: SharedCounter):
        self.replica, self.counter, self.start, self.total = replica, counter, 0.0, 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves out validation, which is that of the finished weights."""
        trainer.limit_val_batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the other processes."""
        self.total = int(trainer.estimated_stepping_batches)
        self.replica.wait_for_start()
        self.start = time.perf_counter()
        self._follow(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Gives the optimizer the rate of the steps so far."""
        self._follow(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the weights and what this process did."""
        outcome = Outcome(
            steps=trainer.global_step, seconds=time.perf_counter() - self.start, averagings=0, sent_bytes=0
        )
        self.replica.finish(pl_module, outcome)

    def _follow(self, trainer: Trainer) -> None:
        schedule = cast(LambdaLR, trainer.lr_scheduler_configs[0].scheduler)
        set_schedule_step(schedule, min(self.counter.read(), self.total - 1))
