"""The learning-rate range test: which peak rate a training can take, before it starts."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Batch
from distill.parallel.clip import clip_gradients
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer, set_rate
from pipelines.runs.training_logs import RangeTest, load_test, store_test

STEPS, LOWEST, HIGHEST = 100, 1e-3, 1e3  # rates as multiples of the optimizer's usual one
_SMOOTHING, _DIVERGED = 0.9, 4.0


def find_rate(module: DistillationModule, data: RowsDataModule, file: Path, seed: int) -> TrainConfig:
    """Returns the training settings with the found peak rate and a linear decay; a stored test isn't run again.

    Args:
        module: Its weights are the same afterwards.
        data: Batches of the training split.
        file: Where rates and losses are written, or were by an earlier attempt.
        seed: Of dropout.

    Source: Smith 2015, Cyclical Learning Rates for Training Neural Networks (arXiv 1506.01186), section 3.3; a tenth of
        the best rate instead of reading the curve is fastai's rule.
    """
    if not file.exists():
        store_test(run_range_test(module, data, seed), file)
    found = load_test(file)
    return replace(module.train_config, learning_rate=found.rate, schedule="linear", rate_scaling="none")


def run_range_test(module: DistillationModule, data: RowsDataModule, seed: int) -> RangeTest:
    """Returns the losses of up to 100 steps at growing rates, until the loss diverges."""
    config = module.train_config
    usual = replace(config, learning_rate=None, rate_scaling="none", schedule="auto")
    initial = {name: value.detach().clone() for name, value in module.state_dict().items()}
    module.on_fit_start()
    optimizer = build_optimizer(
        module.student, module.layer_terms.parameters(), usual, stochastic_rounding=module.stochastic_rounding
    )
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    rates: list[float] = []
    losses: list[float] = []
    average = 0.0
    for step, batch in zip(range(STEPS), yield_batches(data), strict=False):
        torch.manual_seed(seed + step)
        factor = LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            set_rate(group, peak * factor)
        loss = take_step(module, optimizer, batch, config.max_grad_norm)
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


def take_step(module: DistillationModule, optimizer: torch.optim.Optimizer, batch: Batch, max_norm: float) -> float:
    """Takes an optimizer step on a batch and returns its loss."""
    optimizer.zero_grad()
    loss = compute_gradients(module, batch)
    if max_norm:
        clip_gradients(module.parameters(), max_norm)
    optimizer.step()
    return float(loss.detach())


def compute_gradients(module: DistillationModule, batch: Batch) -> Tensor:
    """Adds the gradients of a batch to the parameters', in micro-batches where it can be split; returns its loss."""
    if not module.can_split_batches:
        loss, _ = module.compute_loss(batch)
        loss.backward()
        return loss
    loss, _ = module.micro_batches.run(
        batch, module.compute_loss, lambda part: part.backward(), module.parameters(), lambda parts: None
    )
    return loss


def yield_batches(data: RowsDataModule) -> Iterator[Batch]:
    """Yields training batches from the first epoch on, without an end; the position of `data` doesn't change."""
    batches = data.build_train_batches()
    while True:
        yield from batches
