"""Sparsity settings of a run: the pattern, and the part of training in which zeros are introduced."""

from dataclasses import dataclass, fields
from typing import Literal

from compress.errors import CompressError
from compress.sparsity.schedule import SparsitySchedule

MASK_CHANGES = 50  # approximate number of mask changes in the schedule


@dataclass(frozen=True)
class SparsityConfig:
    """Settings of sparse training; without a pattern the student stays dense.

    Args:
        pattern: unstructured; N:M, such as 2:4; or blocks of outputs x inputs, such as 4x1. Empty: no sparsity.
        amount: Share of the layers' weights that become zero; N:M implies its own.
        score: Importance of a weight: magnitude, or movement (minus weight times gradient, summed over the steps).
        rewire: Share of the nonzero weights that a mask update drops and regrows elsewhere (RigL), falling from `begin`
            to 0 at `end`; 0: none.
        begin: Share of the steps before the first zeros are introduced.
        end: Share of the steps after which all zeros have been introduced, along a cubic from `begin`; the remaining
            steps train the weights that stay.

    Raises:
        CompressError: A value is out of range, or settings contradict each other.
    """

    pattern: str = ""
    amount: float = 0.0
    score: Literal["magnitude", "movement"] = "magnitude"
    rewire: float = 0.0
    begin: float = 0.1
    end: float = 0.6

    def __post_init__(self) -> None:
        for each in fields(self):
            if not self.pattern and getattr(self, each.name) != each.default:
                raise CompressError(
                    f"sparsity.{each.name} {getattr(self, each.name)}: expected a pattern as well, such as "
                    "--sparsity.pattern unstructured, found none: no weight would become zero"
                )
        if not 0 <= self.begin < self.end <= 1:
            raise CompressError(
                f"sparsity.begin, sparsity.end: expected shares of the steps, the first below the second, found "
                f"{self.begin:g} and {self.end:g}"
            )
        if self.pattern:
            self.build_schedule(100)

    @property
    def requested(self) -> bool:
        """Whether sparsity is requested."""
        return bool(self.pattern)

    def build_schedule(self, steps: int) -> SparsitySchedule:
        """Returns the schedule over `steps` optimizer steps.

        Raises:
            CompressError: A value is out of range, or settings contradict each other.
        """
        begin, end = int(self.begin * steps), max(int(self.end * steps), int(self.begin * steps) + 1)
        return SparsitySchedule(
            self.pattern,
            amount=self.amount or None,
            score=self.score,
            rewire=self.rewire,
            begin=begin,
            end=end,
            every=max((end - begin) // MASK_CHANGES, 1),
        )
