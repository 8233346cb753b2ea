"""Each product of a deployed model against the layer it stands for, on the very input that it gets there.

Whole models can't be compared so: where activations are rounded, a difference of the last bit now and then moves a
number by a whole step, and from there on both compute on different numbers. Within a layer that happens only to values
in the middle of two steps, so rows (tokens) that have such a value are left out of its comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from compress.quantize.layers import QuantizedLinear

TIE = 3e-5  # of a step: what float32 can't tell from its middle, some 200 steps from zero


@dataclass(frozen=True)
class Product:
    """What a product read and gave, each [batch, length, …] or [batch, …].

    Args:
        biased: The bias is in what it gave.
    """

    read: np.ndarray
    gave: np.ndarray
    biased: bool = False


@torch.no_grad()
def layer_differences(products: Mapping[str, Product], reference: nn.Module) -> dict[str, float]:
    """Largest difference of each product from its layers', over the largest of its values (at least 1); NaN where every
    row was left out.

    Args:
        products: By layer, or several joined by + whose outputs are side by side.
        reference: The model with layers that round.
    """
    found = {}
    for name, seen in products.items():
        layers = [reference.get_submodule(each) for each in name.split("+")]
        x = torch.from_numpy(seen.read)
        kept = ~torch.stack([cast(QuantizedLinear, layer).near_tie(x, TIE) for layer in layers]).any(0)
        if not kept.any():
            found[name] = float("nan")
            continue
        expected = torch.cat([product(layer, x[kept], seen.biased) for layer in layers], dim=-1)
        difference = (torch.from_numpy(seen.gave)[kept] - expected).abs().max()
        found[name] = float(difference / expected.abs().max().clamp(min=1))
    return found


def worst_layer(products: Mapping[str, Product], reference: nn.Module) -> tuple[str, float]:
    """(name, difference) of the layer that differs most; NaN is most."""
    found = layer_differences(products, reference)
    return max(found.items(), key=lambda each: (np.isnan(each[1]), each[1]))


def product(layer: nn.Module, x: torch.Tensor, biased: bool) -> torch.Tensor:
    assert isinstance(layer, QuantizedLinear)
    return F.linear(layer.rounded_input(x), layer.rounded_weight(), layer.bias if biased else None)
