"""The coordinates of the teacher's weights that a student keeps: those with the largest weights."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from distill.slicing.ranking import find_highest
from distill.slicing.tracing.axes import Axis
from distill.slicing.tracing.classify import find_layer
from distill.slicing.tracing.projections import AttentionProjection, ProjectionRole
from distill.slicing.tracing.trace import Traced
from distill.slicing.weights import list_cuts
from distill.student.sizes import Sizes

_PARTS: tuple[ProjectionRole, ...] = ("query", "key", "value", "output")
_Cuts = dict[str, list[tuple[int, Tensor]]]
Squares = Float64[Tensor, "units"]


def select_coordinates(weights: Mapping[str, Tensor], traced: Traced, stack: str, old: Sizes, new: Sizes) -> _Cuts:
    """Returns weight -> (dimension, kept coordinates) for every dimension that becomes smaller.

    Of each width the units with the largest sums of squares are kept, in all weights that they run through.

    Args:
        weights: Weights of the layers that the student has, under its names.
        traced: The axes of these weights.
        stack: Name of the module list that holds the layers.
        old, new: Sizes of the teacher and of the student.
    """
    counts = {"hidden": (old.hidden, new.hidden), "ffn": (old.ffn, new.ffn)}
    cut = [axis for axis in (*traced.axes, *traced.joined) if axis.kind in counts]
    cut = [axis for axis in cut if axis.units == counts[axis.kind][0] > counts[axis.kind][1]]
    kept = {axis.name: find_highest(sum_unit_squares(weights, axis), counts[axis.kind][1]) for axis in cut}
    cuts = list_cuts(cut, kept)
    if (old.heads, old.key_value_heads, old.head_width) == (new.heads, new.key_value_heads, new.head_width):
        return cuts
    for layer in range(len(new.layers)):
        add_cuts(cuts, select_heads(weights, traced, stack, layer, old, new))
    return cuts


def select_heads(
    weights: Mapping[str, Tensor], traced: Traced, stack: str, layer: int, old: Sizes, new: Sizes
) -> _Cuts:
    """Returns the cuts of a layer's heads: by its projections, or else by its axis if whole units of it are removed."""
    places: dict[tuple[str, int], list[AttentionProjection]] = defaultdict(list)
    for each in sorted(traced.projections, key=lambda each: each.start):
        if find_layer(each.parameter, stack) == layer:
            places[each.parameter, each.dim].append(each)
    squares = sum_part_squares(weights, places)
    if has_heads(squares, old):
        return cut_projections(weights, places, select_head_coordinates(squares, old, new))
    cuts: _Cuts = {}
    for axis in traced.axes:
        if axis.kind == "heads" and axis.layer == layer and is_whole(axis, old, new):
            add_cuts(
                cuts, list_cuts([axis], {axis.name: find_highest(sum_unit_squares(weights, axis), new.key_value_heads)})
            )
    return cuts


def add_cuts(cuts: _Cuts, further: _Cuts) -> None:
    """Adds the dimensions of `further` to `cuts` in place."""
    for name, dimensions in further.items():
        cuts.setdefault(name, []).extend(dimensions)


def list_squares(
    weights: Mapping[str, Tensor], places: Collection[tuple[str, int]]
) -> Iterator[tuple[str, int, Float64[Tensor, "coordinates"]]]:
    """Yields (name, dimension, sums of squares of its coordinates) for the matrices' dimensions among `places`."""
    for name, weight in weights.items():
        for dim in range(2) if weight.dim() == 2 else ():
            if (name, dim) in places:
                yield name, dim, weight.double().pow(2).sum(1 - dim).cpu()


def sum_unit_squares(weights: Mapping[str, Tensor], axis: Axis) -> Squares:
    """Returns, for each unit of an axis, the sum of squares of all matrix entries that belong to it."""
    slots = {(slot.parameter, slot.dim): slot for slot in axis.slots}
    total = torch.zeros(axis.units, dtype=torch.float64)
    for name, dim, squares in list_squares(weights, slots):
        slot = slots[name, dim]
        for block in squares.reshape(slot.outer, axis.units, slot.inner):
            total = total + block.sum(1)
    return total


def sum_part_squares(
    weights: Mapping[str, Tensor], places: Mapping[tuple[str, int], Sequence[AttentionProjection]]
) -> dict[ProjectionRole, Squares]:
    """Returns the sum of squares of the matrix entries of each coordinate of an attention.

    A part whose matrices have several sizes is missing.
    """
    by_part: dict[ProjectionRole, list[Squares]] = defaultdict(list)
    for name, dim, squares in list_squares(weights, places):
        for each in places[name, dim]:
            by_part[each.part].append(squares[each.start : each.start + each.size])
    same = {part: several for part, several in by_part.items() if len({len(squares) for squares in several}) == 1}
    return {part: sum(several[1:], start=several[0]) for part, several in same.items()}


def has_heads(squares: Mapping[ProjectionRole, Squares], sizes: Sizes) -> bool:
    """Returns whether the parts of an attention are those of heads of these sizes."""
    queries, keys = sizes.heads * sizes.head_width, sizes.key_value_heads * sizes.head_width
    return {part: len(each) for part, each in squares.items()} == dict(
        zip(_PARTS, (queries, keys, keys, queries), strict=True)
    )


def is_whole(axis: Axis, old: Sizes, new: Sizes) -> bool:
    """Returns whether whole units of an axis of heads are removed, so that what remains has the same structure."""
    same = old.head_width == new.head_width and old.heads * new.key_value_heads == new.heads * old.key_value_heads
    return same and axis.units == old.key_value_heads


def cut_projections(
    weights: Mapping[str, Tensor],
    places: Mapping[tuple[str, int], Sequence[AttentionProjection]],
    kept: Mapping[ProjectionRole, Int64[Tensor, "kept"]],
) -> _Cuts:
    """Returns the cuts of an attention's weights; a dimension that has coordinates of something else isn't cut."""
    cuts: _Cuts = {}
    for (name, dim), parts in places.items():
        if sum(each.size for each in parts) == weights[name].shape[dim]:
            cuts.setdefault(name, []).append((dim, torch.cat([each.start + kept[each.part] for each in parts])))
    return cuts


def select_head_coordinates(
    squares: Mapping[ProjectionRole, Squares], old: Sizes, new: Sizes
) -> dict[ProjectionRole, Int64[Tensor, "kept"]]:
    """Returns the kept coordinates by part.

    They belong to the groups with the largest sums of squares, and within each group to its heads with the largest
    ones. Within a head they are the largest ones of queries and keys together, and of values and outputs together.
    """
    each, width = old.heads // old.key_value_heads, old.head_width
    q, o = (squares[part].reshape(old.key_value_heads, each, width) for part in ("query", "output"))
    k, v = (squares[part].reshape(old.key_value_heads, width) for part in ("key", "value"))
    strength = (q + o).sum((1, 2)) + (k + v).sum(1)
    coordinates: dict[ProjectionRole, list[Tensor]] = {part: [] for part in _PARTS}
    for group in find_highest(strength, new.key_value_heads).tolist():
        heads = find_highest((q + o)[group].sum(1), new.heads // new.key_value_heads)
        qk = find_highest(q[group, heads].sum(0) + k[group], new.head_width)
        vo = find_highest(o[group, heads].sum(0) + v[group], new.head_width)
        starts = (group * each + heads)[:, None] * width
        coordinates["query"].append((starts + qk).flatten())
        coordinates["output"].append((starts + vo).flatten())
        coordinates["key"].append(group * width + qk)
        coordinates["value"].append(group * width + vo)
    return {part: torch.cat(index) for part, index in coordinates.items()}
