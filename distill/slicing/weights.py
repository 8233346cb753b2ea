"""The weights of a smaller model: those of the kept layers, at the kept coordinates."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from distill.checkpoint.layers import rename_layer
from distill.slicing.tracing.axes import Axis, Kept

Weights = dict[str, Tensor]
_Cuts = Mapping[
    str, Sequence[tuple[int, Tensor]]
]  # weight -> (dimension, its kept coordinates) of each one that is cut


def select_layers(weights: Mapping[str, Tensor], stack: str, layers: Sequence[int]) -> Weights:
    """Returns the weights of the kept layers under their new names, and those outside the layers."""
    names = {name: rename_layer(name, stack, layers) for name in weights}
    return {new: weights[name] for name, new in names.items() if new is not None}


def list_cuts(axes: Iterable[Axis], kept: Kept) -> dict[str, list[tuple[int, Tensor]]]:
    """Returns weight -> (dimension, kept coordinates) for every dimension of an axis in `kept`."""
    cuts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for axis in axes:
        if axis.name in kept:
            for slot in axis.slots:
                cuts[slot.parameter].append((slot.dim, axis.coordinates(slot, kept[axis.name].cpu())))
    return cuts


def cut_weights(weights: Mapping[str, Tensor], cuts: _Cuts) -> Weights:
    """Returns the weights at the kept coordinates; weights that aren't cut are the given tensors themselves."""
    cut = dict(weights)
    for name in cut.keys() & cuts.keys():
        for dim, coordinates in cuts[name]:
            cut[name] = cut[name].index_select(dim, coordinates.to(cut[name].device))
    return cut
