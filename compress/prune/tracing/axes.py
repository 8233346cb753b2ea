"""A coupled dimension: the coordinates of weights that can only be removed together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["hidden", "heads", "ffn", "vocabulary"]
Role = Literal["out", "in", "scale"]
Kept = Mapping[str, Tensor]  # axis name -> numbers of the units that stay, rising


@dataclass(frozen=True)
class Slot:
    """Where an axis runs through a weight.

    The weight's dimension `dim` has outer x units x inner coordinates, in that order: the queries of 12 heads of width
    32 are one outer block of 12 units with inner 32, a fused query-key-value weight has outer 3.

    Args:
        parameter: Name in the model's state_dict.
        dim: Dimension of the weight.
        outer, inner: Blocks around the units.
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
    """Units that live and die together in every slot.

    Args:
        name: `hidden`, `vocabulary`, or with a layer `layers.3.heads`, `layers.3.ffn`.
        kind: What the units are; with grouped queries a unit of `heads` is a key-value head and all its queries.
        layer: Number of the layer, None where the axis runs through the whole model.
        units: How many there are.
        slots: Every place it runs through.
    """

    name: str
    kind: Kind
    layer: int | None
    units: int
    slots: tuple[Slot, ...]

    def coordinates(self, slot: Slot, kept: Tensor) -> Tensor:
        """Coordinates of the slot's dimension that belong to the units `kept` [n] -> [outer * n * inner]."""
        outer = torch.arange(slot.outer)[:, None, None] * self.units
        inner = torch.arange(slot.inner)
        return ((outer + kept[None, :, None]) * slot.inner + inner).flatten()
