"""Training batches that processes claim one after another, so that a slow process takes fewer."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

import numpy as np

from distill.data.batches.batches import TrainBatches
from distill.data.batches.encode import Batch
from distill.data.batches.prefetch import Prefetcher


class Claims(Protocol):
    """A counter that all processes share."""

    def take(self) -> int:
        """Returns the next number, which no other call returns."""

    def read(self) -> int:
        """Returns how many numbers were taken."""


class ClaimedBatches:
    """The batches of a whole training, of which each process gets those that it claims.

    Args:
        batches: The batches of an epoch, whole.
        claims: Counts the optimizer steps that were claimed.
        epochs: Passes over the data.
        accumulate: Batches of an optimizer step, which are claimed together.
    """

    def __init__(self, batches: TrainBatches, claims: Claims, epochs: int, accumulate: int = 1):
        self.batches, self.claims, self.epochs, self.accumulate = batches, claims, epochs, accumulate
        self.waiting = batches.waiting
        self.position = 0  # batches yielded here
        self._order = lru_cache(maxsize=2)(batches.order_rows)  # processes are in two epochs at a time at most

    def __len__(self) -> int:
        """Returns the number of batches of all processes."""
        return self.epochs * len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        source = self.batches
        for batch in Prefetcher(source.build_batch, self._claim(), threads=source.threads, waiting=self.waiting):
            self.position += 1
            yield batch

    def _claim(self) -> Iterator[tuple[np.ndarray, int, int]]:
        """Yields (rows, epoch, number) of this process's batches."""
        while (first := self.claims.take() * self.accumulate) < len(self):
            for number in range(first, min(first + self.accumulate, len(self))):
                epoch, index = divmod(number, len(self.batches))
                yield self._order(epoch)[index], epoch, number

    def state_dict(self) -> dict[str, int]:
        """Returns the number of batches yielded here."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores what `state_dict` returned."""
        self.position = state["position"]
