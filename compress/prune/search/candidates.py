"""Candidate shapes for a budget: for every width and depth, the allocation of lowest estimated loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.prune.importance.scores import Scores
from compress.prune.search.allocate import Choice, Limit, Options, allocate
from compress.prune.search.cost import CostModel, Outline, width_of
from distill.slicing import Axis, Shape

WIDTHS = (1.0, 0.75, 0.5, 0.375, 0.25)
STEPS = 48  # ffn sizes are multiples of the full size divided by this
RATIO = (1, 8)  # neurons per hidden coordinate; blocks far outside this range train worse at the same size
SPENT = 0.85  # shapes below this share of the most expensive shape's latency aren't tried


@dataclass(frozen=True)
class Candidate:
    """A shape with its predicted cost and loss."""

    shape: Shape
    outline: Outline
    choice: Choice
    loss: float  # of the choice and of the reduced width

    @property
    def label(self) -> str:
        layers = ", ".join(f"{n}:{h}x{f}" for n, h, f in zip(self.choice.layers, *self.sizes, strict=True))
        return f"width {self.outline.hidden}, layers {layers}"

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.outline.heads, self.outline.ffn


@dataclass(frozen=True)
class Space:
    """The search space of candidates.

    Args:
        axes: Axes of the full model.
        scores: Importance scores of its units.
        costs: Cost model of the latency.
        step: Widths are multiples of it.
        uniform: Whether all layers get the same sizes, with heads in proportion to the width.
        size: Limit on the bytes of the files.
    """

    axes: Sequence[Axis]
    scores: Scores
    costs: CostModel
    step: int
    uniform: bool = False
    size: Limit | None = None

    def allocate(
        self, hidden: int, depth: int, milliseconds: float, among: Sequence[int] | None = None
    ) -> Choice | None:
        """Allocates units to `depth` layers of a width, within a latency and the bytes."""
        layers = options(self, hidden)
        return allocate(
            layers, self.costs, hidden, depth, milliseconds, uniform=self.uniform, among=among, size=self.size
        )

    def units(self, kind: str) -> dict[int, Axis]:
        """Returns layer -> its axis of a kind; a layer with a single unit of that kind has none."""
        return {axis.layer: axis for axis in self.axes if axis.kind == kind and axis.layer is not None}

    @property
    def layers(self) -> list[int]:
        return sorted({axis.layer for axis in self.axes if axis.layer is not None})

    @property
    def stream(self) -> Axis | None:
        """The hidden axis; None if the residual stream can't be pruned."""
        return stream_of(self.axes)

    @property
    def hidden(self) -> int:
        return self.stream.units if self.stream is not None else 0

    def widths(self) -> list[int]:
        """Returns the widths to try, the full one first; only the full one if the residual stream can't be pruned."""
        if self.stream is None:
            return [self.hidden]
        return list(dict.fromkeys(width_of(self.hidden, share, self.step) for share in WIDTHS))


def candidates(space: Space, milliseconds: float) -> list[Candidate]:
    """Returns shapes for every width and depth that meet `milliseconds` and use most of it, the fewest layers first.

    Each width and depth has two selections of layers: the solver's, and evenly spaced layers. Blocks of unusual
    proportions are omitted unless all are.

    Source of RATIO: within this range the loss hardly depends on it, Kaplan et al. 2020 (arXiv 2001.08361, figure 5).
    """
    depth = len(space.layers)
    found: dict[tuple, Candidate] = {}
    for hidden in space.widths():
        for count in range(1, depth + 1):
            for among in (None, evenly_spaced(count, depth)):
                choice = space.allocate(hidden, count, milliseconds, among)
                if choice is not None:
                    made = candidate(space, hidden, choice)
                    found.setdefault((hidden, choice.layers, *made.sizes), made)
    most = max((each.choice.milliseconds for each in found.values()), default=0.0)
    spent = [each for each in found.values() if each.choice.milliseconds >= SPENT * most]
    usual = [each for each in spent if is_usual(each.outline)]
    return sorted(usual or spent, key=lambda each: (each.outline.depth, -each.outline.hidden))


def is_usual(outline: Outline) -> bool:
    low, high = RATIO
    return low <= sum(outline.ffn) / (outline.depth * max(outline.hidden, 1)) <= high


def reallocated(space: Space, chosen: Candidate, milliseconds: float) -> Candidate | None:
    """Returns the candidate with the same layers and width but units for another budget, None if infeasible."""
    hidden, kept = chosen.outline.hidden, chosen.choice.layers
    choice = space.allocate(hidden, len(kept), milliseconds, kept)
    return candidate(space, hidden, choice) if choice is not None else None


def smallest(space: Space) -> Candidate:
    """Returns the candidate of one layer with the smallest options: no other is faster."""
    hidden = min(space.widths())
    layers = options(space, hidden)
    number, one = max(enumerate(layers), key=lambda each: each[1].layer_loss)
    cost = space.costs.base(hidden) + space.costs.layer(hidden, one.heads[0], one.ffn[0])
    return candidate(space, hidden, Choice((number,), one.heads[:1], one.ffn[:1], float("inf"), cost))


def evenly_spaced(count: int, total: int) -> tuple[int, ...]:
    """Returns `count` evenly spaced layers of `total`, including the first and, for more than one, the last."""
    return (0,) if count == 1 else tuple(round(i * (total - 1) / (count - 1)) for i in range(count))


def options(space: Space, hidden: int) -> list[Options]:
    """Returns the sizes to which each layer may be pruned, with estimated losses."""
    heads, ffn, full = space.units("heads"), space.units("ffn"), outline_of(space.axes)
    found = []
    for layer, units, neurons in zip(space.layers, full.heads, full.ffn, strict=True):
        counts = [in_proportion(units, hidden, space.hidden)] if space.uniform else list(range(1, units + 1))
        step = max(1, neurons // STEPS)
        sizes = [*range(step, neurons, step), neurons]
        found.append(
            Options(
                tuple(counts),
                tuple(sizes),
                removed_loss(space, heads.get(layer), counts),
                removed_loss(space, ffn.get(layer), sizes),
                float(space.scores.layers[layer]),
            )
        )
    return found


def removed_loss(space: Space, axis: Axis | None, kept: Sequence[int]) -> tuple[float, ...]:
    """Returns half the sum of the smallest scores, for each number of kept units."""
    if axis is None:
        return (0.0,) * len(kept)
    scores = space.scores.values[axis.name]
    rising = torch.cat([torch.zeros(1, dtype=scores.dtype), scores.sort().values.cumsum(0)])
    return tuple(0.5 * float(rising[len(scores) - count]) for count in kept)


def in_proportion(units: int, hidden: int, whole: int) -> int:
    """Returns the number of units in proportion to the kept width; all units if the width can't be pruned."""
    return max(1, units * hidden // whole) if whole else units


def candidate(space: Space, hidden: int, choice: Choice) -> Candidate:
    outline = Outline(hidden, choice.heads, choice.ffn)
    shape = shape_of(
        space.axes, choice.layers, outline, lambda axis, count: best(space.scores.values[axis.name], count)
    )
    return Candidate(shape, outline, choice, choice.loss + removed_loss(space, space.stream, [hidden])[0])


def shape_of(
    axes: Sequence[Axis], layers: Sequence[int], outline: Outline, pick: Callable[[Axis, int], Tensor]
) -> Shape:
    """Returns a shape with these layers and the outline's sizes; `pick(axis, count)` selects units of reduced axes."""
    wanted: dict[tuple[str, int | None], int] = {("hidden", None): outline.hidden}
    for layer, heads, ffn in zip(layers, outline.heads, outline.ffn, strict=True):
        wanted |= {("heads", layer): heads, ("ffn", layer): ffn}
    counts = {axis: wanted.get((axis.kind, axis.layer), axis.units) for axis in axes}
    kept = {axis.name: pick(axis, count) for axis, count in counts.items() if count != axis.units}
    return Shape(tuple(layers), kept)


def best(scores: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` highest scores, ascending; the lower index first among equals."""
    return torch.sort(scores, descending=True, stable=True).indices[:count].sort().values


def stream_of(axes: Sequence[Axis]) -> Axis | None:
    return next((axis for axis in axes if axis.kind == "hidden"), None)


def outline_of(axes: Sequence[Axis]) -> Outline:
    """Returns the sizes of the full model; a layer without an axis of a kind counts as one unit of it."""
    stream = stream_of(axes)
    layers = sorted({axis.layer for axis in axes if axis.layer is not None})
    heads, ffn = ({axis.layer: axis.units for axis in axes if axis.kind == kind} for kind in ("heads", "ffn"))
    hidden = stream.units if stream is not None else 0
    return Outline(hidden, *(tuple(each.get(layer, 1) for layer in layers) for each in (heads, ffn)))


def first_units(axes: Sequence[Axis], outline: Outline) -> Shape:
    """Returns a shape of these sizes regardless of scores, for measuring costs."""
    return shape_of(axes, range(outline.depth), outline, lambda axis, count: torch.arange(count))
