"""Labels for tensor dimensions; unification determines which dimensions are the same."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Dimension = tuple[int, ...]  # labels whose sizes multiply to the dimension's, outer first; () is a dimension of size 1


@dataclass
class Label:
    """A factor of a dimension; `became` holds the labels that replaced it, or itself while it is in use."""

    size: int
    became: Dimension
    blocked: str | None = None  # reason why no unit of it can be removed
    normed: bool = False  # a mean, sum or norm reduces over it
    attends: bool = False  # attention has one map for each of its units


class Labels:
    """A union-find structure over labels, which may also split into factors, such as 384 into 12 heads of 32."""

    def __init__(self) -> None:
        self.all: list[Label] = []

    def dimension(self, size: int, blocked: str | None = None) -> Dimension:
        """Creates a dimension of which only the size is known."""
        if size == 1:
            return ()
        self.all.append(Label(size, (len(self.all),), blocked))
        return self.all[-1].became

    def resolve(self, dimension: Iterable[int]) -> Dimension:
        """Returns the labels that the dimension currently consists of."""
        resolved: list[int] = []
        for label in dimension:
            became = self.all[label].became
            resolved += became if became == (label,) else self.resolve(became)
        return tuple(resolved)

    def labels(self, dimension: Iterable[int]) -> list[Label]:
        """Returns the labels of a dimension, with unified ones resolved."""
        return [self.all[label] for label in self.resolve(dimension)]

    def size(self, dimension: Iterable[int]) -> int:
        """Returns the number of coordinates of a dimension."""
        return prod(self.all[label].size for label in dimension)

    def block(self, dimension: Iterable[int], why: str) -> None:
        """Marks all units of the dimension as not removable; the first reason given is retained."""
        for label in self.labels(dimension):
            label.blocked = label.blocked or why

    def split(self, dimension: Dimension, outer: int) -> tuple[Dimension, Dimension] | None:
        """Splits the dimension into `outer` blocks and the inside of a block; None if its factors don't allow it."""
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
        """Declares both dimensions equal; if their factors don't match, both are blocked with `why`."""
        ours, theirs = list(self.resolve(left)), list(self.resolve(right))
        while ours and theirs:
            a, b = ours.pop(0), theirs.pop(0)
            if a == b:
                continue
            if self.all[a].size == self.all[b].size:
                self._merge(a, b)
                # The merged label may occur later in the dimension, too.
                ours, theirs = list(self.resolve(ours)), list(self.resolve(theirs))
                continue
            large, small = (a, b) if self.all[a].size > self.all[b].size else (b, a)
            halves = self.split((large,), self.all[small].size)
            if halves is None:
                self.block((a, b, *ours, *theirs), why)
                return
            ours, theirs = ([*self.resolve((a,)), *ours], [*self.resolve((b,)), *theirs])

    def reshape(self, dimensions: Sequence[Dimension], shape: Sequence[int], why: str) -> list[Dimension]:
        """Returns the dimensions after a view to `shape`; if they don't divide accordingly, blocks them with `why`."""
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
