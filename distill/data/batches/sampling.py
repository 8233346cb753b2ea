"""Choice of the training rows of each epoch; a choice depends on the seed, the epoch and what the sampler was given."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

_UNIFORM_PART = 0.5  # of the probability mass, so that rows without distance are still drawn


class RowSampler(ABC):
    """A choice of rows for every epoch; the base class of those without a state and without weights."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of rows of an epoch, the same in each."""

    @abstractmethod
    def draw(self, epoch: int) -> np.ndarray:
        """Returns the rows of an epoch in any order, int64 [count]."""

    def find_weights(self, rows: np.ndarray) -> np.ndarray | None:
        """Returns the weight of each row's gradient, float64 [rows]; None if all are 1."""
        return None

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 - most samplers have nothing to do
        """Is called before the rows of an epoch are drawn, but not when training resumes within it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to be restored when training resumes within an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have no state
        """Restores what `state_dict` returned."""


@dataclass(frozen=True)
class EveryRow(RowSampler):
    """Every row once, with a function that is called before each epoch.

    Args:
        rows: Number of rows.
        begin: Called with the number of the epoch.
    """

    rows: int
    begin: Callable[[int], None]

    @property
    def count(self) -> int:
        """Number of rows of an epoch."""
        return self.rows

    def draw(self, epoch: int) -> np.ndarray:
        """Returns all rows."""
        return np.arange(self.rows)

    def begin_epoch(self, epoch: int) -> None:
        """Calls the function."""
        self.begin(epoch)


@dataclass(frozen=True)
class SyntheticShare(RowSampler):
    """All real rows and `per_epoch` synthetic rows; no synthetic row is repeated before all have been used.

    Args:
        rows: Number of all rows.
        first, last: The first synthetic row and the one after the last.
        per_epoch: Synthetic rows of an epoch.
        seed: Seed of their order.
    """

    rows: int
    first: int
    last: int
    per_epoch: int
    seed: int

    @property
    def count(self) -> int:
        """Number of rows of an epoch."""
        return self.rows - (self.last - self.first) + self.per_epoch

    def draw(self, epoch: int) -> np.ndarray:
        """Returns the real rows and the synthetic ones whose turn it is."""
        synthetic = draw_in_turn(self.first, self.last, self.per_epoch, epoch, self.seed)
        return np.concatenate([np.arange(self.first), np.arange(self.last, self.rows), synthetic])


def draw_in_turn(first: int, last: int, count: int, epoch: int, seed: int) -> np.ndarray:
    """Returns `count` of the rows from `first` to `last`; over the epochs, no row is drawn again before all have been.

    Once all have been drawn, their order is drawn anew.
    """
    size = last - first
    places = np.arange(epoch * count, (epoch + 1) * count)
    rows = np.empty(count, np.int64)
    for turn in np.unique(places // size):
        order = np.random.default_rng([seed, int(turn)]).permutation(size)
        mask = places // size == turn
        rows[mask] = first + order[places[mask] % size]
    return rows


@dataclass(frozen=True)
class ClassBalanced(RowSampler):
    """The same number of rows of each class; the rows of a class are used in turn.

    Args:
        classes: The class of each row; rows with a negative one, without a label, are a class too.
        seed: Seed of the order.
        unbiased: Whether weights make up for the frequencies.
    """

    classes: np.ndarray
    seed: int
    unbiased: bool = False

    @property
    def count(self) -> int:
        """Number of rows of an epoch."""
        return len(self.classes)

    def draw(self, epoch: int) -> np.ndarray:
        """Returns rows of every class, in the same number but for rounding."""
        names = np.unique(self.classes)
        bounds = np.linspace(0, self.count, len(names) + 1).round().astype(np.int64)
        drawn = []
        for number, (name, size) in enumerate(zip(names, np.diff(bounds), strict=True)):
            rows = np.flatnonzero(self.classes == name)
            turns = draw_in_turn(0, len(rows), int(size), epoch, self.seed + number)
            drawn.append(rows[turns])
        return np.concatenate(drawn)

    def find_weights(self, rows: np.ndarray) -> np.ndarray | None:
        """Returns a class's share of the rows over its share of the draws, if weights are wanted."""
        return self._row_weights[rows] if self.unbiased else None

    @cached_property
    def _row_weights(self) -> np.ndarray:
        _, inverse, counts = np.unique(self.classes, return_inverse=True, return_counts=True)
        weights: np.ndarray = (counts * len(counts) / self.count)[inverse]
        return weights


@dataclass(frozen=True)
class Curriculum(RowSampler):
    """Easy rows first: an epoch draws from the easiest share of the rows, which grows until it has all.

    The share of epoch e of E is sqrt(s² + (1 - s²) · e / (E - 1)), from s in the first one.

    Args:
        difficulty: Of each row; equal ones are in the order of the rows.
        epochs: Number of epochs.
        start: The share of the first epoch, s.
        seed: Seed of the draws.

    Source:
        Platanios et al., "Competence-based Curriculum Learning for Neural Machine Translation" (NAACL 2019), section
        2.2, the square root, with a constant share during each epoch.
    """

    difficulty: np.ndarray
    epochs: int
    start: float
    seed: int

    @property
    def count(self) -> int:
        """Number of rows of an epoch."""
        return len(self.difficulty)

    def find_share(self, epoch: int) -> float:
        """Returns the share of the rows that an epoch draws from."""
        progress = 1.0 if self.epochs == 1 else min(1.0, epoch / (self.epochs - 1))
        return float(np.sqrt(self.start**2 + (1 - self.start**2) * progress))

    def draw(self, epoch: int) -> np.ndarray:
        """Returns rows among the easiest; how often two rows are drawn differs by at most one."""
        available = max(1, round(self.find_share(epoch) * self.count))
        easy = np.argsort(self.difficulty, kind="stable")[:available]
        rng = np.random.default_rng([self.seed, epoch])
        turns = [rng.permutation(available) for _ in range(-(-self.count // available))]
        return easy[np.concatenate(turns)[: self.count]]


@dataclass
class DistanceSampler(RowSampler):
    """Rows in proportion to the mean of their distance and the average distance; uniform in the first epoch.

    Args:
        rows: Number of rows.
        measure: Returns the divergence of the student from the teacher for each row, at least 0, float64 [rows]; called
            before every epoch but the first.
        seed: Seed of the draws.
        unbiased: Whether weights make up for the frequencies.
        distances: What `measure` returned last; empty before.
    """

    rows: int
    measure: Callable[[], np.ndarray]
    seed: int
    unbiased: bool = False
    distances: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def begin_epoch(self, epoch: int) -> None:
        """Measures the distances."""
        self.distances = self.measure() if epoch else np.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        """Returns the distances."""
        return {"distances": torch.from_numpy(self.distances)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the distances."""
        self.distances = state["distances"].numpy()

    @property
    def count(self) -> int:
        """Number of rows of an epoch."""
        return self.rows

    def find_probabilities(self) -> np.ndarray:
        """Returns the probability of each row, float64 [rows]."""
        uniform = np.full(self.rows, 1 / self.rows)
        total = self.distances.sum()
        if not total:  # also without distances
            return uniform
        probabilities: np.ndarray = _UNIFORM_PART * uniform + (1 - _UNIFORM_PART) * self.distances / total
        return probabilities

    def draw(self, epoch: int) -> np.ndarray:
        """Returns rows by systematic sampling: each about as often as its probability times the number of rows."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.rows)
        edges = np.cumsum(self.find_probabilities()[order])
        points = (np.arange(self.rows) + rng.random()) / self.rows * edges[-1]
        rows: np.ndarray = order[np.minimum(np.searchsorted(edges, points, "right"), self.rows - 1)]
        return rows

    def find_weights(self, rows: np.ndarray) -> np.ndarray | None:
        """Returns the uniform probability over that of each row, if weights are wanted."""
        if not (self.unbiased and len(self.distances)):
            return None
        weights: np.ndarray = 1 / (self.rows * self.find_probabilities()[rows])
        return weights


def list_classes(labels: Sequence[int], rows: int) -> np.ndarray:
    """Returns the class of each of `rows` rows, int64 [rows]: -1 for rows after those with labels."""
    classes = np.full(rows, -1, np.int64)
    classes[: len(labels)] = labels
    return classes
