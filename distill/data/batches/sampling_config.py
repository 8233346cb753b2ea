"""Settings of the choice of training rows in each epoch."""

from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError

Sampling = Literal["uniform", "balanced", "length", "difficulty", "distance"]


@dataclass(frozen=True)
class SamplingConfig:
    """Which rows the student trains on in each epoch; every epoch has as many as there are rows.

    Args:
        by: uniform: every row once. balanced: equally many rows of each class. length and difficulty: a curriculum that
            begins with the shortest rows, or those with the lowest teacher entropy. distance: half at
            random, half in proportion to the student's divergence from the teacher, measured before each epoch but the
            first.
        start: For a curriculum: easiest share of the rows that the first epoch uses; it grows until the last uses all.
        unbiased: For distance and balanced: weight each row's gradient by its inverse sampling frequency, so that the
            expected gradient is that of uniform sampling.
    """

    by: Sampling = "uniform"
    start: float = 0.2
    unbiased: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.start <= 1:
            raise InputError(f"sampling.start: expected a share above 0 and at most 1, found {self.start:g}")
        if self.unbiased and self.by not in ("distance", "balanced"):
            raise InputError(
                f"sampling.unbiased: expected sampling.by distance or balanced, found {self.by}: its rows have no "
                "frequencies that weights could make up for"
            )
