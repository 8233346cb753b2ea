"""The part of a model that is kept: its layers, and the units of its axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypedDict

import torch
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.slicing.tracing.axes import Axis, Kept

_SHOWN = 20  # numbers that a message lists


class PlainShape(TypedDict):
    """A shape as lists and numbers that JSON supports."""

    layers: list[int]
    kept: dict[str, list[int]]


@dataclass(frozen=True, eq=False)
class Shape:
    """The layers and units that are kept.

    Args:
        layers: Indices of the kept layers, ascending.
        kept: Axis name -> indices of the kept units, ascending, int64 [n]; axes have the names they have in the model
            before pruning, and axes that aren't listed are kept whole.
    """

    layers: tuple[int, ...]
    kept: Kept = field(default_factory=dict)

    def to_dict(self) -> PlainShape:
        """Returns the shape as lists and numbers that JSON supports."""
        return {"layers": list(self.layers), "kept": {name: units.tolist() for name, units in self.kept.items()}}

    @classmethod
    def from_dict(cls, plain: PlainShape | Mapping[str, object]) -> "Shape":
        """Returns the shape that `to_dict` converted."""
        layers, kept = plain["layers"], plain["kept"]
        assert isinstance(layers, Sequence)
        assert isinstance(kept, Mapping)
        return cls(tuple(layers), {name: torch.tensor(units, dtype=torch.int64) for name, units in kept.items()})

    def count_units(self, axis: Axis) -> int:
        """Returns the number of kept units of an axis."""
        return len(self.kept[axis.name]) if axis.name in self.kept else axis.units


def check_shape(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> None:
    """Checks that the shape names existing layers and units and keeps at least one of each.

    Raises:
        InputError: The shape doesn't fit the model.
    """
    by_name = {axis.name: axis for axis in axes}
    check_indices("layers", shape.layers, model.config.num_hidden_layers)
    for name, units in shape.kept.items():
        if name not in by_name:
            near = get_close_matches(name, by_name, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {sorted(by_name)}"
            raise InputError(f"shape: expected the name of an axis, found {name!r}: nothing would be removed; {hint}")
        if units.dim() != 1 or units.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"{name}: expected int64 indices [units], found {units.dtype} {list(units.shape)}: they address no unit"
            )
        check_indices(name, units.tolist(), by_name[name].units)


def check_indices(name: str, indices: Sequence[int], count: int) -> None:
    """Checks that the indices are ascending and between 0 and `count` - 1, and that there is one.

    Raises:
        InputError: They aren't.
    """
    if not indices:
        raise InputError(f"{name}: expected at least one kept of {count}, found none: no signal would pass")
    ascending = all(a < b for a, b in zip(indices, indices[1:], strict=False))
    if not ascending or indices[0] < 0 or indices[-1] >= count:
        raise InputError(
            f"{name}: expected ascending indices from 0 to {count - 1}, found {list(indices)[:_SHOWN]}: units would be "
            "missing or repeated"
        )
