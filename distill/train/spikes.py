"""Detection of a loss that isn't finite or is far above those before it, after which the training has to go back."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_WINDOW = 32  # most recent losses, whose median is the reference
_FEWEST = 8  # with fewer losses there is no reference: only a loss that isn't finite is a spike


@dataclass(frozen=True)
class Spike:
    """A loss after which the weights can't be trusted.

    Args:
        batch: Number of the batch, counted from the start of the training.
        step: Optimizer steps completed before it.
        loss: The loss.
        usual: The median of the losses before it; NaN if there were too few.
    """

    batch: int
    step: int
    loss: float
    usual: float


class LossSpikeError(Exception):
    """Ends a training at a spike, to be started again from its last checkpoint."""

    def __init__(self, spike: Spike):
        super().__init__(f"loss {spike.loss:.4g} in step {spike.step}, where {spike.usual:.4g} is usual")
        self.spike = spike


class SpikeDetector:
    """The last losses of a training, and whether another is a spike.

    Args:
        ratio: A loss more than this many times the median of the last 32 is a spike.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio
        self.losses: deque[float] = deque(maxlen=_WINDOW)

    @property
    def usual(self) -> float:
        """The median of the last losses; NaN if there are fewer than 8."""
        return median(self.losses) if len(self.losses) >= _FEWEST else math.nan

    def is_spike(self, loss: float) -> bool:
        """Returns whether a loss is a spike; one that isn't is added to the last losses."""
        if not math.isfinite(loss) or loss > self.ratio * self.usual:  # False if the median is NaN
            return True
        self.losses.append(loss)
        return False

    def restore(self, losses: Iterable[float]) -> None:
        """Replaces the last losses by those of a checkpoint."""
        self.losses = deque(losses, maxlen=_WINDOW)


class SpikeWatch:
    """Finds spikes in the steps of a training, and which of its batches are skipped because of earlier ones.

    Args:
        ratio: As in `SpikeDetector`.
    """

    def __init__(self, ratio: float):
        self.detector = SpikeDetector(ratio)
        self.skipped_batches: frozenset[int] = frozenset()  # numbers, counted from the start of the training
        self.rate_factor = 1.0  # of the learning rate, after earlier spikes
        self.is_skipping = False  # whether the current step has one of the skipped batches
        self.spike: Spike | None = None  # in the current batch

    def start_batch(self, trainer: Trainer | None, batch_idx: int) -> None:
        """Forgets the last batch's spike, and finds whether the step of this batch is skipped."""
        self.is_skipping, self.spike = self.is_step_skipped(trainer, batch_idx), None

    def is_step_skipped(self, trainer: Trainer | None, batch_idx: int) -> bool:
        """Returns whether a batch of the batch's optimizer step is to be skipped.

        Without its last batch, processes wouldn't exchange the gradients of a step.
        """
        if not self.skipped_batches or trainer is None:
            return False
        accumulated = trainer.accumulate_grad_batches
        first = batch_idx - batch_idx % accumulated
        step = range(first, min(first + accumulated, int(trainer.num_training_batches)))
        return any(count_batches(trainer, number) in self.skipped_batches for number in step)

    def observe_loss(self, trainer: Trainer, student: nn.Module, loss: Tensor, batch_idx: int) -> None:
        """Records whether a batch's loss is a spike, in any process.

        The backward pass of a spike also reduces the gradients that FSDP accumulates.
        """
        loss = loss.detach().nan_to_num(nan=torch.inf, posinf=torch.inf)
        if trainer.world_size > 1:
            loss = cast(Tensor, trainer.strategy.reduce(loss.clone(), reduce_op="max"))
        usual = self.detector.usual
        if not self.detector.is_spike(float(loss)):
            return
        for module in student.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(True)
        self.spike = Spike(count_batches(trainer, batch_idx), trainer.global_step, float(loss), usual)

    def raise_if_found(self) -> None:
        """Ends the training at a spike.

        Raises:
            LossSpikeError: The loss of the current batch is a spike.
        """
        if self.spike is not None:
            raise LossSpikeError(self.spike)


def count_batches(trainer: Trainer, batch_idx: int) -> int:
    """Returns the number of a batch of the current epoch, counted from the start of the training."""
    return trainer.current_epoch * int(trainer.num_training_batches) + batch_idx
