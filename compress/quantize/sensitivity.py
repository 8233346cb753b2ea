"""Sensitivity of layers to quantization, measured by the change of the outputs with one group quantized alone."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from compress.errors import CompressError
from compress.layer_inputs import CalibrationBatch, find_shared_inputs
from compress.quantize.layers import QuantizedLayer, QuantizedLinear, find_quantized_layers
from compress.quantize.prepare import restore_plain_layers
from compress.quantize.schemes import Scheme, widen_scheme

Layers = Mapping[str, QuantizedLayer]


@dataclass(frozen=True)
class Sensitivity:
    """Effect of quantizing one group of layers alone.

    Args:
        layers: Names; layers that take the same tensor form one group, because deployed files merge them.
        divergence: Divergence of the model's outputs from those in float.
    """

    layers: tuple[str, ...]
    divergence: float


@torch.no_grad()
def measure_sensitivities(
    model: nn.Module, measure_divergence: Callable[[], float], batch: CalibrationBatch, *, reduce_range: bool = False
) -> list[Sensitivity]:
    """Returns the sensitivity of every group of layers of a prepared and calibrated model, the most sensitive first.

    Each group is measured with more bits in all other layers.

    Args:
        model: In eval mode; restored afterwards.
        measure_divergence: Returns the divergence of the model's current outputs from those in float.
        batch: A batch of model inputs, which determines the layers that take the same tensor.
        reduce_range: Whether the wider schemes' weights are limited by `reduce_weight_range`.
    """
    layers = find_quantized_layers(model)
    sensitivities = []
    for group in group_layers(model, layers, batch):
        with _widen_inside(layers, [name for name in layers if name not in group], reduce_range):
            sensitivities.append(Sensitivity(group, measure_divergence()))
    return sorted(sensitivities, key=lambda each: each.divergence, reverse=True)


@torch.no_grad()
def widen_most_sensitive(
    model: nn.Module,
    ranked: Sequence[Sensitivity],
    measure_score: Callable[[], float],
    target_score: float,
    *,
    reduce_range: bool = False,
) -> tuple[list[str], float]:
    """Gives more bits to the fewest of the most sensitive groups that reach `target_score`, in place.

    These layers then have 8 bits instead of 4, or stay in float.

    Args:
        model: Prepared and calibrated.
        ranked: Result of `measure_sensitivities`.
        measure_score: Returns the score of the model as it currently is; higher is better.
        target_score: Score to reach: the share `quantize.min_score_share` of the float model's.
        reduce_range: Whether the wider schemes' weights are limited by `reduce_weight_range`.

    Returns:
        Names of the layers that have more bits, and the score.

    Raises:
        CompressError: The score isn't reached even with a single group left in the scheme.
    """
    layers = find_quantized_layers(model)
    low, high, scores = 0, len(ranked), dict[int, float]()
    while low < high:
        middle = (low + high) // 2
        with _widen_inside(layers, [name for group in ranked[:middle] for name in group.layers], reduce_range):
            scores[middle] = measure_score()
        low, high = (low, middle) if scores[middle] >= target_score else (middle + 1, high)
    if low == len(ranked):
        raise CompressError(
            f"quantize.min_score_share: expected a validation score of {target_score:.4f} (that share of the float "
            f"model's), found {max(scores.values()):.4f} at best, even with more bits in all but one of {len(ranked)} "
            "groups of layers: choose a scheme with more bits or a lower min_score_share"
        )
    names = [name for group in ranked[:low] for name in group.layers]
    for name in names:
        _widen(layers[name], reduce_range)
    restore_plain_layers(model, [name for name in names if not layers[name].fake_quant_enabled])
    return names, scores[low]


def group_layers(model: nn.Module, layers: Layers, batch: CalibrationBatch) -> list[tuple[str, ...]]:
    """Returns groups of linear layers that take the same tensor, and each table with the head tied to it."""
    linears = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    tables = {id(layer.weight): name for name, layer in layers.items() if name not in linears}
    groups: dict[str, list[str]] = {name: [name] for name in tables.values()}
    for name, first in find_shared_inputs(model, linears, batch).items():
        groups.setdefault(tables.get(id(layers[first].weight), first), []).append(name)
    return [tuple(names) for names in groups.values()]


@contextmanager
def _widen_inside(layers: Layers, names: Collection[str], reduce_range: bool) -> Iterator[None]:
    """Gives the named layers more bits inside the block, or turns off their quantization."""
    previous = {name: (layer.fake_quant_enabled, _get_scheme(layer)) for name, layer in layers.items()}
    for name in names:
        _widen(layers[name], reduce_range)
    try:
        yield
    finally:
        for name, (enabled, scheme) in previous.items():
            layer = layers[name]
            layer.fake_quant_enabled = enabled
            if isinstance(layer, QuantizedLinear) and scheme is not None:
                layer.scheme = scheme


def _get_scheme(layer: QuantizedLayer) -> Scheme | None:
    return layer.scheme if isinstance(layer, QuantizedLinear) else None


def _widen(layer: QuantizedLayer, reduce_range: bool) -> None:
    wider = widen_scheme(layer.scheme, reduce_range=reduce_range) if isinstance(layer, QuantizedLinear) else None
    if isinstance(layer, QuantizedLinear) and wider is not None:
        layer.scheme = wider
    else:
        layer.fake_quant_enabled = False
