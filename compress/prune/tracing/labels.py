"""Labels for dimensions of tensors: which of them are one and the same, found by unification."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Dimension = tuple[int, ...]  # labels whose sizes multiply to the dimension, outer first; () is a dimension of size 1


@dataclass
class Label:
    """A factor of a dimension: `became` points to what it turned out to be, itself where it stands for itself."""

    size: int
    became: Dimension
    blocked: str | None = None  # why no unit of it can be removed
    normed: bool = False  # a mean, a sum or a norm runs over it
    attends: bool = False  # attention runs along it, one map for each unit


class Labels:
    """Union-find over labels in which a label may also fall apart into factors, as 384 into 12 heads of 32."""

    def __init__(self) -> None:
        self.all: list[Label] = []

    def dimension(self, size: int, blocked: str | None = None) -> Dimension:
        """A dimension of which nothing is known yet but its size."""
        if size == 1:
            return ()
        self.all.append(Label(size, (len(self.all),), blocked))
        return self.all[-1].became

    def resolve(self, dimension: Iterable[int]) -> Dimension:
        """The labels that the dimension consists of by now."""
        found: list[int] = []
        for label in dimension:
            became = self.all[label].became
            found += became if became == (label,) else self.resolve(became)
        return tuple(found)

    def labels(self, dimension: Iterable[int]) -> list[Label]:
        return [self.all[label] for label in self.resolve(dimension)]

    def size(self, dimension: Iterable[int]) -> int:
        return prod(self.all[label].size for label in dimension)

    def block(self, dimension: Iterable[int], why: str) -> None:
        """No unit of the dimension can be removed; the first reason given is kept."""
        for label in self.labels(dimension):
            label.blocked = label.blocked or why

    def split(self, dimension: Dimension, outer: int) -> tuple[Dimension, Dimension] | None:
        """The dimension as `outer` blocks and what lies inside a block; None where its factors don't divide so."""
        first: list[int] = []
        rest = list(self.resolve(dimension))
        while rest and (size := self.all[rest[0]].size) <= outer and outer % size == 0:
            first.append(rest.pop(0))
            outer //= size
        if outer > 1:
            if not rest or self.all[rest[0]].size % outer:
                return None
            into, inside = self._halve(rest.pop(0), outer)
            first, rest = [*first, *into], [*inside, *rest]
        return tuple(first), tuple(rest)

    def unify(self, left: Dimension, right: Dimension, why: str) -> None:
        """Both dimensions are the same; where their factors don't fit each other, both are blocked with `why`."""
        ours, theirs = list(self.resolve(left)), list(self.resolve(right))
        while ours and theirs:
            a, b = ours.pop(0), theirs.pop(0)
            if a == b:
                continue
            if self.all[a].size == self.all[b].size:
                self._merge(a, b)
                # The merged label may lie further on, too.
                ours, theirs = list(self.resolve(ours)), list(self.resolve(theirs))
                continue
            large, small = (a, b) if self.all[a].size > self.all[b].size else (b, a)
            halves = self.split((large,), self.all[small].size)
            if halves is None:
                self.block((a, b, *ours, *theirs), why)
                return
            ours, theirs = ([*self.resolve((a,)), *ours], [*self.resolve((b,)), *theirs])

    def reshape(self, dimensions: Sequence[Dimension], shape: Sequence[int], why: str) -> list[Dimension]:
        """The dimensions after a view to `shape`; those that don't divide so are blocked with `why`."""
        rest: Dimension = tuple(label for dimension in dimensions for label in dimension)
        result: list[Dimension] = []
        for size in shape:
            halves = self.split(rest, size)
            if halves is None:
                self.block(rest, why)
                for known in result:
                    self.block(known, why)
                return [self.dimension(size, why) for size in shape]
            result.append(halves[0])
            rest = halves[1]
        return result

    def _halve(self, label: int, outer: int) -> tuple[Dimension, Dimension]:
        old = self.all[label]
        halves = []
        for size in (outer, old.size // outer):
            (new,) = self.dimension(size, old.blocked)
            self.all[new].normed, self.all[new].attends = old.normed, old.attends
            halves.append(new)
        old.became = (halves[0], halves[1])
        return (halves[0],), (halves[1],)

    def _merge(self, a: int, b: int) -> None:
        one, other = self.all[a], self.all[b]
        other.became = (a,)
        one.blocked = one.blocked or other.blocked
        one.normed |= other.normed
        one.attends |= other.attends
