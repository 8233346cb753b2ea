"""Sensitivity of layers to quantization, measured by the change of the outputs with one group quantized alone."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from compress.errors import CompressError
from compress.quantize.layers import QuantizedEmbedding, QuantizedLinear
from compress.quantize.prepare import as_plain
from compress.quantize.ranges import same_inputs
from compress.quantize.schemes import wider_scheme

Layers = Mapping[str, QuantizedLinear | QuantizedEmbedding]


@dataclass(frozen=True)
class Sensitivity:
    """Effect of quantizing one group of layers alone.

    Args:
        layers: Names; layers that take the same tensor form one group, because deployed files merge them.
        divergence: Divergence of the model's outputs from those in float, as returned by `judge`.
    """

    layers: tuple[str, ...]
    divergence: float


@torch.no_grad()
def sensitivities(
    model: nn.Module, judge: Callable[[], float], batch: Mapping[str, torch.Tensor], *, in_7_bits: bool = False
) -> list[Sensitivity]:
    """Returns the sensitivity of every group of layers of a prepared and calibrated model, the most sensitive first.

    Each group is measured with more bits in all other layers.

    Args:
        model: In eval mode; restored afterwards.
        judge: Returns the divergence of the model's current outputs from those in float.
        batch: A batch of model inputs, which determines the layers that take the same tensor.
        in_7_bits: Whether wider schemes use at most 7 bits for weights whose inputs have 8.
    """
    layers = rounding_layers(model)
    found = []
    for group in grouped_layers(model, layers, batch):
        with widened(layers, [name for name in layers if name not in group], in_7_bits):
            found.append(Sensitivity(group, judge()))
    return sorted(found, key=lambda each: each.divergence, reverse=True)


def rounding_layers(model: nn.Module) -> dict[str, QuantizedLinear | QuantizedEmbedding]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear | QuantizedEmbedding)}


def grouped_layers(model: nn.Module, layers: Layers, batch: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Returns groups of linear layers that take the same tensor, and each table with the head tied to it."""
    linears = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    tables = {id(layer.weight): name for name, layer in layers.items() if name not in linears}
    groups: dict[str, list[str]] = {name: [name] for name in tables.values()}
    for name, first in same_inputs(model, linears, batch).items():
        groups.setdefault(tables.get(id(layers[first].weight), first), []).append(name)
    return [tuple(names) for names in groups.values()]


@contextmanager
def widened(layers: Layers, names: Collection[str], in_7_bits: bool = False) -> Iterator[None]:
    """Gives the named layers more bits inside the block, or turns off their quantization."""
    before = {name: (layer.rounds, getattr(layer, "scheme", None)) for name, layer in layers.items()}
    for name in names:
        widen(layers[name], in_7_bits)
    try:
        yield
    finally:
        for name, (rounds, scheme) in before.items():
            layer = layers[name]
            layer.rounds = rounds
            if isinstance(layer, QuantizedLinear) and scheme is not None:
                layer.scheme = scheme


def widen(layer: QuantizedLinear | QuantizedEmbedding, in_7_bits: bool) -> None:
    more = wider_scheme(layer.scheme, in_7_bits=in_7_bits) if isinstance(layer, QuantizedLinear) else None
    if isinstance(layer, QuantizedLinear) and more is not None:
        layer.scheme = more
    else:
        layer.rounds = False


@torch.no_grad()
def widen_most_sensitive(
    model: nn.Module,
    ranked: Sequence[Sensitivity],
    score: Callable[[], float],
    least: float,
    *,
    in_7_bits: bool = False,
) -> tuple[list[str], float]:
    """Gives more bits to the fewest of the most sensitive groups that reach a score of `least`, in place.

    These layers then have 8 bits instead of 4, or stay in float.

    Args:
        model: Prepared and calibrated.
        ranked: Result of `sensitivities`.
        score: Returns the score of the model as it currently is; higher is better.
        least: Score to reach.
        in_7_bits: Whether wider schemes use at most 7 bits for weights whose inputs have 8.

    Returns:
        Names of the layers that have more bits, and the score.

    Raises:
        CompressError: The score isn't reached even with a single group left in the scheme.
    """
    layers = rounding_layers(model)
    low, high, found = 0, len(ranked), dict[int, float]()
    while low < high:
        middle = (low + high) // 2
        with widened(layers, [name for group in ranked[:middle] for name in group.layers], in_7_bits):
            found[middle] = score()
        low, high = (low, middle) if found[middle] >= least else (middle + 1, high)
    if low == len(ranked):
        raise CompressError(
            f"quantize.min_score: expected a score of {least:.4f}, found {max(found.values()):.4f} at best, even with "
            f"all but one of {len(ranked)} groups of layers in more bits: this scheme can't keep it before it is "
            "trained; a scheme with more bits or a lower min_score can"
        )
    names = [name for group in ranked[:low] for name in group.layers]
    for name in names:
        widen(layers[name], in_7_bits)
    as_plain(model, [name for name in names if not layers[name].rounds])
    return names, found[low]
