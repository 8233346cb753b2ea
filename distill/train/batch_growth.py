"""Effective batches that grow during a training, with the learning rate: by a schedule, or with the gradient's noise.

Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1: the simple
noise scale from the gradient norms of two batch sizes. Here the small batch is the first one of an accumulation and the
large batch is the whole accumulation; batches grow between epochs only. The rate grows with the root of the batch, as
Malladi et al. 2022 (arXiv 2205.10287) derive for Adam, or linearly with `rate_scaling: linear`.
"""

import math

from distill.train.config import TrainConfig

_DECAY = 0.98  # of the running means
NOISE, SCHEDULE = "noise", "schedule"
NOISE_VERSION = 2  # of the noise's measurement; 1 took the last batch's gradient for that of the accumulation


class NoiseScale:
    """The rows per batch at which the noise of the gradient is as large as the gradient."""

    def __init__(self) -> None:
        self.trace, self.square, self.weight = 0.0, 0.0, 0.0

    def observe(self, small: float, large: float, small_rows: int, large_rows: int) -> None:
        """Adds the squared norms of the mean gradients of a small batch and of a larger one that contains it."""
        trace = (small - large) / (1 / small_rows - 1 / large_rows)
        square = (large_rows * large - small_rows * small) / (large_rows - small_rows)
        self.trace = _DECAY * self.trace + (1 - _DECAY) * trace
        self.square = _DECAY * self.square + (1 - _DECAY) * square
        self.weight = _DECAY * self.weight + 1 - _DECAY

    @property
    def rows(self) -> float:
        """The ratio of the means of the trace of the covariance and the squared gradient; 0 if unknown.

        The mean of the ratios would be biased.
        """
        if not self.weight:
            return 0.0
        return math.inf if self.square <= 0 else max(0.0, self.trace / self.square)


class BatchGrowth:
    """How many times the accumulation of the settings is accumulated now.

    Args:
        config: The kind of growth, and the rows of the first and of the largest batch.
    """

    def __init__(self, config: TrainConfig):
        self.config, self.noise = config, NoiseScale()
        self.factor, self.epoch = 1, 0
        self.steps = 0  # that would have been taken without growth
        self.small: float | None = None  # squared norm of the first batch's gradient in this accumulation

    @property
    def accumulated(self) -> int:
        """Batches per optimizer step."""
        return self.config.accumulate * self.factor

    @property
    def rate_factor(self) -> float:
        """Factor on the learning rate."""
        return float(self.factor) if self.config.rate_scaling == "linear" else math.sqrt(self.factor)

    def start_epoch(self, epoch: int) -> None:
        """Grows the batch if it is due; the first epoch is 0. Calling it again within an epoch changes nothing."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._grow()

    def _grow(self) -> None:
        """Doubles the batch: by schedule, or if the noise scale is at least twice the batch."""
        rows = self.config.rows * self.accumulated
        is_due = self.config.batch_growth == SCHEDULE or self.noise.rows >= 2 * rows
        if is_due and 2 * rows <= self.config.largest_batch:
            self.factor *= 2

    def observe_batch(self, square: float, number: int) -> None:
        """Takes the squared norm of the accumulated gradient after a batch of an accumulation; the first is kept.

        Args:
            square: Squared norm of the sum of the gradients so far, each divided by the number of accumulated batches.
            number: Number of the batch in its accumulation, from 0.
        """
        if number == 0:
            self.small = square * self.accumulated**2
        if number == self.accumulated - 1 and self.small is not None:
            rows = self.config.rows
            self.noise.observe(self.small, square, rows, rows * self.accumulated)
            self.small = None

    def state_dict(self) -> dict[str, float]:
        """Returns the factor, the epoch, the number of steps and the running means."""
        noise = self.noise
        return {
            "factor": self.factor,
            "epoch": self.epoch,
            "steps": self.steps,
            "trace": noise.trace,
            "square": noise.square,
            "weight": noise.weight,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what `state_dict` returned."""
        self.factor, self.epoch, self.steps = int(state["factor"]), int(state["epoch"]), int(state["steps"])
        self.noise.trace, self.noise.square, self.noise.weight = state["trace"], state["square"], state["weight"]
