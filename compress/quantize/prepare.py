"""Preparation of a model for quantization-aware training, and its conversion back to plain weights with scales."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.quantize.grid import fake_quantize_weight, grouped, quantize_weight
from compress.quantize.layers import InputGrid, QuantizedEmbedding, QuantizedLinear, linear_as, table_as
from compress.quantize.schemes import INT8, Numbers, Scheme


@dataclass(frozen=True)
class LayerQuantization:
    """Scheme and grids by which a layer is quantized.

    Args:
        scheme: Scheme of a linear layer; None for an embedding table.
        scales: Weight scales [outputs, groups], float32.
        grid: (scale, zero point) of the inputs if the scheme has per-tensor grids.
    """

    scheme: Scheme | None
    scales: Tensor
    grid: tuple[float, int] | None = None

    @property
    def numbers(self) -> Numbers:
        return self.scheme.numbers if self.scheme is not None else INT8

    def stored(self, weight: Tensor) -> Tensor:
        """Returns the weight [outputs, inputs] as int8 or float8_e4m3fn."""
        return quantize_weight(weight, self.scales, self.numbers)


Rounding = Mapping[str, LayerQuantization]  # name of a module -> how it is quantized


def precision_of(rounding: Rounding) -> str:
    """Returns the lowest precision of the quantized linear layers: int4, fp8 or int8."""
    found = {rounded.scheme.precision for rounded in rounding.values() if rounded.scheme is not None}
    return min(found, key=("int4", "fp8", "int8").index, default="int8")


def prepare(
    model: nn.Module, scheme: Scheme | Mapping[str, Scheme], *, keep: tuple[str, ...] = (), in_7_bits: bool = False
) -> list[str]:
    """Replaces every linear layer and embedding table by a quantized one, with the same parameter objects.

    Args:
        model: Changed in place.
        scheme: For every linear layer, or by layer name: layers that aren't listed stay in float.
        keep: Patterns of names that stay in float, such as `*.classifier`.
        in_7_bits: Whether byte products may not use 8-bit weights: the inputs of a head tied to the token table then
            stay in float. The scheme is `reduced` already.

    Returns:
        Names of the quantized layers.

    Raises:
        CompressError: The model is quantized already, its weights aren't finite, or it has no layer to quantize.
    """
    check_plain(model)
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    found = []
    for name, layer in rounded_layers(model, keep).items():
        chosen = scheme if isinstance(scheme, Scheme) else scheme.get(name)
        if isinstance(layer, nn.Linear) and chosen is not None:
            if id(layer.weight) in tables:  # a tied decoder head: one tensor can't be on two grids
                chosen = as_table(chosen, in_7_bits)
            check_finite(name, layer.weight)
            grouped(layer.weight, chosen.group)
            replace(model, name, QuantizedLinear.of(layer, chosen))
        elif isinstance(layer, nn.Embedding):
            check_finite(name, layer.weight)
            replace(model, name, table_as(QuantizedEmbedding, layer))
        else:
            continue
        found.append(name)
    if not any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise CompressError(f"quantize: {type(model).__name__} has no linear layer that the scheme is for")
    return found


def as_table(scheme: Scheme, in_7_bits: bool) -> Scheme:
    """Returns the scheme for a head that shares its weight with an embedding table, which has 8 bits."""
    if scheme.floats or in_7_bits:  # no kernel multiplies integers by 8-bit floats
        return Scheme("int8-weights")
    return dataclasses.replace(scheme, bits=8, group=0)


def rounded_layers(model: nn.Module, keep: tuple[str, ...] = ()) -> dict[str, nn.Linear | nn.Embedding]:
    """Returns the linear layers and embedding tables that can be quantized.

    Excluded are tables that do more than look up rows (Gemma 3's multiplies them), layers that match `keep`, and any
    layer that shares its weight with one of these.

    Raises:
        CompressError: The model has Conv1D layers, which hold most of its weights.
    """
    layers: dict[str, nn.Linear | nn.Embedding] = {}
    apart: set[int] = set()
    for name, layer in model.named_modules():
        if type(layer).__name__ == "Conv1D":
            raise CompressError(
                f"quantize: {name} is a Conv1D, expected linear layers: of {type(model).__name__} only the head "
                "would be rounded; families with linear layers can be, such as Llama and Qwen"
            )
        if isinstance(layer, nn.Linear | nn.Embedding):
            layers[name] = layer
            other = isinstance(layer, nn.Embedding) and type(layer).forward is not nn.Embedding.forward
            if other or any(fnmatch(name, pattern) for pattern in keep):
                apart.add(id(layer.weight))
    return {name: layer for name, layer in layers.items() if id(layer.weight) not in apart}


def learn_scales(model: nn.Module) -> None:
    """Makes the weight scales of a `prepare`d model trainable, see `QuantizedLinear.learn_scales`."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear) and not is_tied(model, layer):
            layer.learn_scales()


def is_tied(model: nn.Module, layer: nn.Module) -> bool:
    """Returns whether the layer shares its weight with an embedding table, whose grid it then uses."""
    return any(isinstance(m, nn.Embedding) and m.weight is layer.weight for m in model.modules())


def check_plain(model: nn.Module) -> None:
    told = getattr(getattr(model, "config", None), "quantization_config", None)
    if told is not None:
        raise CompressError(
            f"quantize: {type(model).__name__} is quantized already ({told}): rounding rounded weights again would "
            "lose more; start from the float checkpoint"
        )
    done = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear | QuantizedEmbedding)]
    if done:
        raise CompressError(f"quantize: {done[0]} rounds already: `convert` the model before it is prepared again")


def check_finite(name: str, weight: Tensor) -> None:
    wrong = int((~torch.isfinite(weight)).sum())
    if wrong:
        raise CompressError(
            f"quantize: {name}.weight has {wrong} values that aren't finite, expected none: no scale has them"
        )


def replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


@torch.no_grad()
def convert(model: nn.Module) -> dict[str, LayerQuantization]:
    """Restores a prepared model's plain layers, with their weights on the grid, and returns the grids by layer name.

    Raises:
        CompressError: A layer has no input grid yet, or the model has no quantized layer.
    """
    found: dict[str, LayerQuantization] = {}
    done: dict[int, Tensor] = {}  # a table tied to a decoder's head is rounded once
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear | QuantizedEmbedding)}
    for name, layer in layers.items():
        if id(layer.weight) not in done:
            done[id(layer.weight)] = scales = layer.weight_scales().detach().clone()
            layer.weight.data = fake_quantize_weight(layer.weight, scales, layer.numbers)
        scales = done[id(layer.weight)]
        if isinstance(layer, QuantizedLinear):
            found[name] = LayerQuantization(layer.scheme, scales, grid_of(name, layer))
        else:
            found[name] = LayerQuantization(None, scales)
    as_plain(model, list(layers))
    if not found:
        raise CompressError(f"quantize: {type(model).__name__} has no layer that rounds: `prepare` it first")
    return found


def as_plain(model: nn.Module, names: Iterable[str]) -> None:
    """Replaces quantized layers by plain ones with the same parameters."""
    for name in names:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            replace(model, name, linear_as(nn.Linear, layer))
        elif isinstance(layer, nn.Embedding):
            replace(model, name, table_as(nn.Embedding, layer))


def grid_of(name: str, layer: QuantizedLinear) -> tuple[float, int] | None:
    if layer.scheme.inputs != "tensor":
        return None
    if layer.grid is None:
        raise CompressError(f"quantize: the inputs of {name} have no range yet: `calibrate` the model first")
    return float(layer.grid.scale.abs()), int(layer.grid.zero)


def requantize(model: nn.Module, rounding: Rounding) -> None:
    """Quantizes a converted model again with the numbers it was converted with: the reference for deployed files.

    Raises:
        CompressError: The model lacks one of the layers.
    """
    layers = dict(model.named_modules())
    for name, rounded in rounding.items():
        layer = layers.get(name)
        if rounded.scheme is None and isinstance(layer, nn.Embedding):
            replace(model, name, table_as(QuantizedEmbedding, layer))
        elif rounded.scheme is not None and isinstance(layer, nn.Linear):
            made = QuantizedLinear.of(layer, rounded.scheme)
            made.scales = rounded.scales
            made.grid = fixed_grid(*rounded.grid) if rounded.grid is not None else None
            replace(model, name, made)
        else:
            raise CompressError(
                f"quantize: the model has no layer {name!r} to round: these numbers are another model's"
            )


def fixed_grid(scale: float, zero: int) -> InputGrid:
    made = InputGrid(torch.zeros(()), torch.zeros(()))
    made.scale.fill_(scale)
    made.zero.fill_(zero)
    return made
