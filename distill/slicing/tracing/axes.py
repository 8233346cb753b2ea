"""Coupled dimensions: coordinates of weights that can only be removed together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AxisKind = Literal["hidden", "heads", "ffn", "vocabulary"]
Role = Literal["out", "in", "scale"]
Kept = Mapping[str, Tensor]  # axis name -> indices of the units to keep, ascending


@dataclass(frozen=True)
class Slot:
    """The occurrence of an axis in one dimension of a weight.

    The weight's dimension `dim` has outer x units x inner coordinates, in that order: the queries of 12 heads of width
    32 are one outer block of 12 units with inner 32, a fused query-key-value weight has outer 3.

    Args:
        parameter: Name in the model's state_dict.
        dim: Dimension of the weight.
        outer, inner: Blocks outside the units, and coordinates inside a unit.
        role: The weight produces the axis (a row of a linear layer, a bias, a column of an embedding), consumes it (a
            column of a linear layer), or scales it (a norm's weight and bias).
    """

    parameter: str
    dim: int
    outer: int
    inner: int
    role: Role


@dataclass(frozen=True)
class Axis:
    """Units that are removed together from every slot.

    Args:
        name: `hidden`, `vocabulary`, or with a layer `layers.3.heads`, `layers.3.ffn`.
        kind: Kind of the units; with grouped queries a unit of `heads` is a key-value head and all its queries.
        layer: Index of the layer, None for an axis that spans the whole model.
        units: Number of units.
        slots: All occurrences of the axis in weights.
    """

    name: str
    kind: AxisKind
    layer: int | None
    units: int
    slots: tuple[Slot, ...]

    def coordinates(self, slot: Slot, kept: Tensor) -> Tensor:
        """Returns the coordinates of the slot's dimension for the units `kept` [n] -> [outer * n * inner]."""
        outer = torch.arange(slot.outer)[:, None, None] * self.units
        inner = torch.arange(slot.inner)
        return ((outer + kept[None, :, None]) * slot.inner + inner).flatten()
