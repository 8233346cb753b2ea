"""Comparison of each product of a deployed model with its layer, on the input that the deployed product gets.

Whole models can't be compared this way if activations are rounded: a difference of the last bit occasionally moves a
value by a whole step, and from then on both compute on different numbers. Within a layer this only happens to values
near the midpoint of two steps, so rows (tokens) with such a value are excluded from its comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from compress.quantize.layers import QuantizedLinear

TIE = 3e-5  # in steps: float32's resolution around a midpoint some 200 steps from zero


@dataclass(frozen=True)
class Product:
    """Input and output of a matrix product, each [batch, length, …] or [batch, …].

    Args:
        input: Input.
        output: Output.
        biased: Whether the output includes the bias.
    """

    input: np.ndarray
    output: np.ndarray
    biased: bool = False


@torch.no_grad()
def layer_differences(products: Mapping[str, Product], reference: nn.Module) -> dict[str, float]:
    """Returns the largest difference of each product from its layers', over their largest value (at least 1).

    It is NaN if every row was excluded.

    Args:
        products: By layer name, or several names joined by + whose outputs are concatenated.
        reference: The model with quantized layers.
    """
    differences = {}
    for name, seen in products.items():
        layers = [reference.get_submodule(each) for each in name.split("+")]
        x = torch.from_numpy(seen.input)
        decisive = ~torch.stack([cast(QuantizedLinear, layer).find_near_ties(x, TIE) for layer in layers]).any(0)
        if not decisive.any():
            differences[name] = float("nan")
            continue
        expected = torch.cat([compute_product(layer, x[decisive], seen.biased) for layer in layers], dim=-1)
        difference = (torch.from_numpy(seen.output)[decisive] - expected).abs().max()
        differences[name] = float(difference / expected.abs().max().clamp(min=1))
    return differences


def worst_layer(products: Mapping[str, Product], reference: nn.Module) -> tuple[str, float]:
    """Returns (name, difference) of the layer with the largest difference; NaN counts as largest."""
    differences = layer_differences(products, reference)
    return max(differences.items(), key=lambda each: (np.isnan(each[1]), each[1]))


def compute_product(layer: nn.Module, x: torch.Tensor, biased: bool) -> torch.Tensor:
    """Returns the layer's product with `x`, with its bias if `biased`."""
    assert isinstance(layer, QuantizedLinear)
    return F.linear(layer.round_input(x), layer.round_weight(), layer.bias if biased else None)
