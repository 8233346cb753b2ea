"""Candidate shapes for a budget: for every width and depth, the allocation of lowest estimated loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.prune.importance.scores import Scores
from compress.prune.search.allocate import Allocation, LayerOptions, Limit, allocate
from compress.prune.search.cost import CostModel, ModelSizes, predict_slowest, round_width
from distill.slicing import Axis, Shape
from distill.slicing.ranking import find_highest
from distill.slicing.spacing import space_layers_evenly

_WIDTHS = (1.0, 0.75, 0.5, 0.375, 0.25)
STEPS = 48  # ffn sizes are multiples of the full size divided by this, rounded up to `ffn_multiple`
FFN_RATIO = (1, 8)  # neurons per hidden coordinate; blocks far outside this range train worse at the same size
MIN_BUDGET_USE = 0.85  # candidates below this share of the slowest candidate's latency are omitted


@dataclass(frozen=True)
class Candidate:
    """A shape with its predicted cost and loss."""

    shape: Shape
    sizes: ModelSizes
    allocation: Allocation
    loss: float  # of the allocation and of the reduced width

    @property
    def label(self) -> str:
        """Description for logs: the width, and each layer's number, heads and neurons."""
        layers = ", ".join(f"{n}:{h}x{f}" for n, h, f in zip(self.allocation.layers, *self.unit_counts, strict=True))
        return f"width {self.sizes.hidden}, layers {layers}"

    @property
    def unit_counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Heads of each layer and neurons of each layer."""
        return self.sizes.heads, self.sizes.ffn


@dataclass(frozen=True)
class SearchSpace:
    """The search space of candidates.

    Args:
        axes: Axes of the full model.
        scores: Importance scores of its units.
        costs: Cost models of the latency; the highest counts, such as that of texts of one of several lengths, each
            scaled by how much that latency may be.
        step: Widths are multiples of it.
        uniform: Whether all layers get the same sizes, with heads in proportion to the width.
        size: Limit on the bytes of the files.
        ffn_multiple: Numbers of feed-forward neurons are multiples of it, or all of a layer's: quantization by groups
            and patterns of zeros need sizes that they divide.
    """

    axes: Sequence[Axis]
    scores: Scores
    costs: Sequence[CostModel]
    step: int
    uniform: bool = False
    size: Limit | None = None
    ffn_multiple: int = 1

    def allocate(
        self, hidden: int, depth: int, milliseconds: float, fixed_layers: Sequence[int] | None = None
    ) -> Allocation | None:
        """Allocates units to `depth` layers of a width, within a latency and the bytes."""
        options = list_layer_options(self, hidden)
        return allocate(
            options,
            self.costs,
            hidden,
            depth,
            milliseconds,
            uniform=self.uniform,
            fixed_layers=fixed_layers,
            size=self.size,
        )

    def predict(self, sizes: ModelSizes) -> float:
        """Returns the predicted milliseconds per call."""
        return predict_slowest(self.costs, sizes)

    def find_axes(self, kind: str) -> dict[int, Axis]:
        """Returns layer -> its axis of a kind; a layer with a single unit of that kind has none."""
        return {axis.layer: axis for axis in self.axes if axis.kind == kind and axis.layer is not None}

    @property
    def layers(self) -> list[int]:
        """Indices of the layers with an axis."""
        return sorted({axis.layer for axis in self.axes if axis.layer is not None})

    @property
    def hidden_axis(self) -> Axis | None:
        """The hidden axis; None if the residual stream can't be pruned."""
        return _find_hidden_axis(self.axes)

    @property
    def hidden(self) -> int:
        """Full width; 0 if the residual stream can't be pruned."""
        return self.hidden_axis.units if self.hidden_axis is not None else 0

    def list_widths(self) -> list[int]:
        """Returns the widths to try, the full one first; only the full one if the residual stream can't be pruned."""
        if self.hidden_axis is None:
            return [self.hidden]
        return list(dict.fromkeys(round_width(self.hidden, share, self.step) for share in _WIDTHS))


def list_candidates(space: SearchSpace, milliseconds: float) -> list[Candidate]:
    """Returns shapes for every width and depth that meet `milliseconds` and use most of it, the fewest layers first.

    Each width and depth has two selections of layers: the solver's, and evenly spaced layers. Blocks of unusual
    proportions are omitted unless all are.

    Source: within FFN_RATIO the loss hardly depends on it, Kaplan et al. 2020 (arXiv 2001.08361), figure 5.
    """
    depth = len(space.layers)
    candidates: dict[tuple[object, ...], Candidate] = {}
    for hidden in space.list_widths():
        for count in range(1, depth + 1):
            for fixed_layers in (None, space_layers_evenly(count, depth)):
                allocation = space.allocate(hidden, count, milliseconds, fixed_layers)
                if allocation is not None:
                    candidate = _make_candidate(space, hidden, allocation)
                    candidates.setdefault((hidden, allocation.layers, *candidate.unit_counts), candidate)
    slowest = max((each.allocation.milliseconds for each in candidates.values()), default=0.0)
    large = [each for each in candidates.values() if each.allocation.milliseconds >= MIN_BUDGET_USE * slowest]
    usual = [each for each in large if _has_usual_ratio(each.sizes)]
    return sorted(usual or large, key=lambda each: (each.sizes.depth, -each.sizes.hidden))


def _has_usual_ratio(sizes: ModelSizes) -> bool:
    low, high = FFN_RATIO
    return low <= sum(sizes.ffn) / (sizes.depth * max(sizes.hidden, 1)) <= high


def reallocate(space: SearchSpace, candidate: Candidate, milliseconds: float) -> Candidate | None:
    """Returns a candidate with the same layers and width but units for another budget, None if infeasible."""
    return allocate_layers(space, candidate.sizes.hidden, candidate.allocation.layers, milliseconds)


def allocate_layers(space: SearchSpace, hidden: int, layers: Sequence[int], milliseconds: float) -> Candidate | None:
    """Returns a candidate with these layers and this width, None if infeasible."""
    allocation = space.allocate(hidden, len(layers), milliseconds, layers)
    return _make_candidate(space, hidden, allocation) if allocation is not None else None


def make_smallest_candidate(space: SearchSpace) -> Candidate:
    """Returns the candidate of one layer with the smallest options: no other is faster.

    Of equally fast layers it is the most important.
    """
    hidden = min(space.list_widths())
    options = list_layer_options(space, hidden)
    costs = [space.predict(ModelSizes(hidden, each.heads[:1], each.ffn[:1])) for each in options]
    layer = min(range(len(options)), key=lambda number: (costs[number], -options[number].layer_loss))
    option, cost = options[layer], costs[layer]
    return _make_candidate(space, hidden, Allocation((layer,), option.heads[:1], option.ffn[:1], float("inf"), cost))


def list_layer_options(space: SearchSpace, hidden: int) -> list[LayerOptions]:
    """Returns the sizes to which each layer may be pruned, with estimated losses."""
    heads, ffn, full = space.find_axes("heads"), space.find_axes("ffn"), get_sizes(space.axes)
    options = []
    for layer, units, neurons in zip(space.layers, full.heads, full.ffn, strict=True):
        head_counts = [_scale_to_width(units, hidden, space.hidden)] if space.uniform else list(range(1, units + 1))
        step = max(1, -(-(neurons // STEPS) // space.ffn_multiple)) * space.ffn_multiple
        neuron_counts = [*range(step, neurons, step), neurons]
        options.append(
            LayerOptions(
                tuple(head_counts),
                tuple(neuron_counts),
                _estimate_losses(space, heads.get(layer), head_counts),
                _estimate_losses(space, ffn.get(layer), neuron_counts),
                float(space.scores.layers[layer]),
            )
        )
    return options


def _estimate_losses(space: SearchSpace, axis: Axis | None, counts: Sequence[int]) -> tuple[float, ...]:
    """Returns half the sum of the smallest scores, for each number of kept units."""
    if axis is None:
        return (0.0,) * len(counts)
    scores = space.scores.values[axis.name]
    sums = torch.cat([torch.zeros(1, dtype=scores.dtype), scores.sort().values.cumsum(0)])  # of the lowest scores
    return tuple(0.5 * float(sums[len(scores) - count]) for count in counts)


def _scale_to_width(units: int, hidden: int, full: int) -> int:
    """Returns the number of units in proportion to the kept width; all units if the width can't be pruned."""
    return max(1, units * hidden // full) if full else units


def _make_candidate(space: SearchSpace, hidden: int, allocation: Allocation) -> Candidate:
    sizes = ModelSizes(hidden, allocation.heads, allocation.ffn)
    shape = _make_shape(
        space.axes, allocation.layers, sizes, lambda axis, count: find_highest(space.scores.values[axis.name], count)
    )
    loss = allocation.loss + _estimate_losses(space, space.hidden_axis, [hidden])[0]
    return Candidate(shape, sizes, allocation, loss)


def _make_shape(
    axes: Sequence[Axis], layers: Sequence[int], sizes: ModelSizes, pick: Callable[[Axis, int], Tensor]
) -> Shape:
    """Returns a shape with these layers and sizes; `pick(axis, count)` selects the units of reduced axes."""
    wanted: dict[tuple[str, int | None], int] = {("hidden", None): sizes.hidden}
    for layer, heads, ffn in zip(layers, sizes.heads, sizes.ffn, strict=True):
        wanted |= {("heads", layer): heads, ("ffn", layer): ffn}
    counts = {axis: wanted.get((axis.kind, axis.layer), axis.units) for axis in axes}
    kept_units = {axis.name: pick(axis, count) for axis, count in counts.items() if count != axis.units}
    return Shape(tuple(layers), kept_units)


def _find_hidden_axis(axes: Sequence[Axis]) -> Axis | None:
    return next((axis for axis in axes if axis.kind == "hidden"), None)


def get_sizes(axes: Sequence[Axis]) -> ModelSizes:
    """Returns the sizes of the full model; a layer without an axis of a kind counts as one unit of it."""
    hidden_axis = _find_hidden_axis(axes)
    layers = sorted({axis.layer for axis in axes if axis.layer is not None})
    heads, ffn = ({axis.layer: axis.units for axis in axes if axis.kind == kind} for kind in ("heads", "ffn"))
    hidden = hidden_axis.units if hidden_axis is not None else 0
    return ModelSizes(hidden, *(tuple(units.get(layer, 1) for layer in layers) for units in (heads, ffn)))


def make_first_units_shape(axes: Sequence[Axis], sizes: ModelSizes) -> Shape:
    """Returns a shape of these sizes regardless of scores, for measuring costs."""
    return _make_shape(axes, range(sizes.depth), sizes, lambda axis, count: torch.arange(count))
