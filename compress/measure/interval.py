"""Confidence intervals of measured latencies and speed-ups, by resampling blocks of texts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compress.errors import CompressError

CONFIDENCE = 0.95
MIN_BLOCKS = 6  # below, no resampling covers a true value in 95 of 100 cases: with 5 blocks at most in 94
_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A measured value with its confidence interval; `high` is infinite if a single block was measured."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Width of the interval, relative to the value."""
        return (self.high - self.low) / self.value

    def scale(self, factor: float) -> "Estimate":
        """Returns the estimate times a positive factor."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def invert(self) -> "Estimate":
        """Returns the estimate of the reciprocal, such as texts per millisecond from milliseconds per text."""
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low if self.low else float("inf"))


def estimate_ratio(numerator: np.ndarray, denominator: np.ndarray, confidence: float = CONFIDENCE) -> Estimate:
    """Returns the ratio of two models' latencies: of the medians over all calls of each call's fastest repetition.

    Args:
        numerator, denominator: Milliseconds of each call's fastest repetition [blocks, calls], of the same texts; the
            models alternated within a block, and blocks were timed one after another.
        confidence: Share of measurements whose interval contains the true ratio.

    Raises:
        CompressError: The shapes differ, or a time isn't above 0.

    Source: percentile bootstrap over blocks (Efron and Tibshirani 1993, chapters 8 and 13), with the percentiles
        expanded for few blocks as in Hesterberg 2015 (doi 10.1080/00031305.2015.1089789, section 3.2). A block is
        resampled with the times of both models, because what slows the machine down slows both, and because texts of a
        block have lengths of their own.
    """
    _check_times(numerator, denominator)

    def compute(weights: np.ndarray) -> np.ndarray:
        ratios: np.ndarray = _take_medians(numerator, weights) / _take_medians(denominator, weights)
        return ratios

    return _bootstrap(compute, len(numerator), confidence)


def estimate_median(times: np.ndarray, confidence: float = CONFIDENCE) -> Estimate:
    """Returns a model's latency, the median over all calls of each call's fastest repetition, as in `estimate_ratio`.

    Raises:
        CompressError: A time isn't above 0.
    """
    _check_times(times, times)
    return _bootstrap(lambda weights: _take_medians(times, weights), len(times), confidence)


def _take_medians(times: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the medians over all calls [resamples], with each block as often as its weight [resamples, blocks]."""
    order = times.argsort(axis=None)
    ascending, blocks = times.ravel()[order], order // times.shape[1]
    ranks = weights[:, blocks].cumsum(axis=1, dtype=np.int32)
    middle = [ascending[(ranks > rank).argmax(axis=1)] for rank in ((times.size - 1) // 2, times.size // 2)]
    medians: np.ndarray = (middle[0] + middle[1]) / 2
    return medians


def _bootstrap(compute: Callable[[np.ndarray], np.ndarray], blocks: int, confidence: float) -> Estimate:
    """Returns an estimate of `compute`, which maps the blocks' weights [resamples, blocks] to values [resamples]."""
    from scipy.stats import norm, t

    value = float(compute(np.ones((1, blocks), np.int16))[0])
    if blocks == 1:
        return Estimate(value, 0.0, float("inf"))
    tail = norm.cdf(-np.sqrt(blocks / (blocks - 1)) * t.isf((1 - confidence) / 2, blocks - 1))
    weights = np.random.default_rng(0).multinomial(blocks, np.full(blocks, 1 / blocks), _RESAMPLES).astype(np.int16)
    low, high = np.quantile(compute(weights), [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def _check_times(first: np.ndarray, second: np.ndarray) -> None:
    if first.shape != second.shape or first.ndim != 2 or not first.size:
        raise CompressError(
            f"times: expected two arrays [blocks, calls] of the same calls, found {first.shape} and {second.shape}: "
            "their ratio would compare different texts"
        )
    if not ((first > 0).all() and (second > 0).all()):
        raise CompressError("times: expected milliseconds above 0, found others: nothing was measured")
