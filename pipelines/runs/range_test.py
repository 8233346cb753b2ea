"""The learning-rate range test: which peak rate a training can take, before it starts."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compress.measure.precision_modes import MODES
from compress.measure.precision_speed import autocast_to_mode
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Batch
from distill.parallel.clip import clip_gradients
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer, set_rate
from pipelines.runs.loss_scaling import ShardedScaler
from pipelines.runs.memory.step_cost import find_device
from pipelines.runs.training_logs import RangeTest, load_test, store_test

STEPS, LOWEST, HIGHEST = 100, 1e-3, 1e3  # rates as multiples of the optimizer's usual one
_SMOOTHING, _DIVERGED = 0.9, 4.0


def find_rate(module: DistillationModule, data: RowsDataModule, file: Path, seed: int, precision: str) -> TrainConfig:
    """Returns the training settings with the found peak rate and a linear decay; a stored test isn't run again.

    Args:
        module: Its weights are the same afterwards.
        data: Batches of the training split.
        file: Where rates and losses are written, or were by an earlier attempt.
        seed: Of dropout.
        precision: Name of the precision.

    Source: Smith 2015, Cyclical Learning Rates for Training Neural Networks (arXiv 1506.01186), section 3.3; a tenth of
        the best rate instead of reading the curve is fastai's rule.
    """
    if not file.exists():
        store_test(run_range_test(module, data, seed, precision), file)
    range_test = load_test(file)
    return replace(module.train_config, learning_rate=range_test.rate, schedule="linear", rate_scaling="none")


def run_range_test(module: DistillationModule, data: RowsDataModule, seed: int, precision: str) -> RangeTest:
    """Returns the losses of up to 100 steps at growing rates, until the loss diverges."""
    config = module.train_config
    usual = replace(config, learning_rate=None, rate_scaling="none", schedule="auto")
    initial = {name: value.detach().clone() for name, value in module.state_dict().items()}
    module.on_fit_start()
    optimizer = build_optimizer(
        module.student, module.layer_terms.parameters(), usual, stochastic_rounding=module.stochastic_rounding
    )
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    step_taker = StepTaker(module, optimizer, config.max_grad_norm, precision)
    rates: list[float] = []
    losses: list[float] = []
    average = 0.0
    for step, batch in zip(range(STEPS), data.repeat_train_batches(), strict=False):
        torch.manual_seed(seed + step)
        factor = LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            set_rate(group, peak * factor)
        loss = step_taker.take_step(batch)
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smoothed = average / (1 - _SMOOTHING ** (step + 1))
        if not math.isfinite(smoothed) or (losses and smoothed > _DIVERGED * min(losses)):
            break
        rates.append(usual.peak_rate * factor)
        losses.append(smoothed)
    optimizer.zero_grad()
    module.on_fit_end()
    module.load_state_dict(initial)
    return RangeTest(tuple(rates), tuple(losses))


class StepTaker:
    """Takes optimizer steps as a training in a precision does, the loss scaled for float16.

    Args:
        module: The training.
        optimizer: Of its parameters.
        max_norm: Of the gradient; 0 for any.
        precision: Name of the precision.
    """

    def __init__(self, module: DistillationModule, optimizer: torch.optim.Optimizer, max_norm: float, precision: str):
        self.module, self.optimizer, self.max_norm, self.precision = module, optimizer, max_norm, precision
        self.device = find_device(module)
        self.scaler = ShardedScaler(self.device.type, enabled=MODES[precision].product_dtype == torch.float16)

    def take_step(self, batch: Batch) -> float:
        """Takes a step on a batch and returns its loss; gradients that overflow leave the weights as they are."""
        self.optimizer.zero_grad()
        loss = self.compute_gradients(batch)
        self.scaler.unscale_(self.optimizer)
        if self.max_norm:
            clip_gradients(self.module.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())

    def compute_gradients(self, batch: Batch) -> Tensor:
        """Adds the gradients of a batch, split into micro-batches where it can be, and returns its loss."""
        if not self.module.can_split_batches:
            loss, _ = self.compute_loss(batch)
            self.backward(loss)
            return loss
        loss, _ = self.module.micro_batches.run(
            batch,
            self.compute_loss,
            self.backward,
            self.module.parameters(),
            lambda parts: None,
            self.module.divide_batch,
        )
        return loss

    def compute_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and the terms in the precision."""
        with autocast_to_mode(self.precision, self.device):
            return self.module.compute_loss(batch)

    def backward(self, loss: Tensor) -> None:
        """Runs a backward pass of the scaled loss."""
        self.scaler.scale(loss).backward()
