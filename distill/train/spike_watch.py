"""Spikes of the loss in the steps of a training, and the batches that are skipped because of earlier ones."""

from typing import cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distill.train.spikes import LossSpikeError, Spike, SpikeDetector


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
