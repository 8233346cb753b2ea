"""Preparation of a model for quantization-aware training, and its conversion back to plain weights with scales."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.quantize.fake_quantize import fake_quantize_weight
from compress.quantize.grid import quantize_weight, split_groups
from compress.quantize.layers import (
    InputGrid,
    QuantizedEmbedding,
    QuantizedLinear,
    find_quantized_layers,
    find_quantized_linears,
    rebuild_embedding,
    rebuild_linear,
)
from compress.quantize.schemes import INT8, NumberFormat, Scheme

_PRECISIONS = ("int4", "fp8", "int8")  # from the lowest to the highest


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
    def number_format(self) -> NumberFormat:
        """Values that a weight can take, in units of its scale."""
        return self.scheme.number_format if self.scheme is not None else INT8

    @property
    def stored_bits(self) -> int:
        """Bits per weight in a file."""
        return self.scheme.stored_bits if self.scheme is not None else 8

    def quantize(self, weight: Tensor) -> Tensor:
        """Returns the weight [outputs, inputs] as int8 or float8_e4m3fn."""
        return quantize_weight(weight, self.scales, self.number_format)


ModelQuantization = Mapping[str, LayerQuantization]  # name of a layer -> how it is quantized


def prepare_quantized(
    model: nn.Module, scheme: Scheme | Mapping[str, Scheme], *, keep: tuple[str, ...] = (), reduce_range: bool = False
) -> list[str]:
    """Replaces every linear layer and embedding table by a quantized one, with the same parameter objects.

    Args:
        model: Changed in place.
        scheme: For every linear layer, or by layer name: layers that aren't listed stay in float.
        keep: Patterns of names that stay in float, such as `*.classifier`.
        reduce_range: Whether integer products may not use all 8 bits of weights: the inputs of a head tied to the token
            table then stay in float. The weight range of the scheme itself must be reduced already.

    Returns:
        Names of the quantized layers.

    Raises:
        CompressError: The model is quantized already, its weights aren't finite, or it has no layer to quantize.
    """
    check_unquantized(model)
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    names = []
    for name, layer in find_quantizable_layers(model, keep).items():
        layer_scheme = scheme if isinstance(scheme, Scheme) else scheme.get(name)
        if isinstance(layer, nn.Linear) and layer_scheme is not None:
            if id(layer.weight) in tables:  # one tensor can't be on two grids
                layer_scheme = _choose_tied_head_scheme(layer_scheme, reduce_range)
            _check_finite(name, layer.weight)
            split_groups(layer.weight, layer_scheme.find_group(layer.in_features))
            replace_module(model, name, QuantizedLinear.from_linear(layer, layer_scheme))
        elif isinstance(layer, nn.Embedding):
            _check_finite(name, layer.weight)
            replace_module(model, name, rebuild_embedding(QuantizedEmbedding, layer))
        else:
            continue
        names.append(name)
    if not names:
        raise CompressError(
            f"quantize: expected linear layers or tables to quantize, found none in {type(model).__name__} that the "
            "scheme applies to: nothing would be quantized"
        )
    return names


@torch.no_grad()
def convert_quantized(model: nn.Module) -> dict[str, LayerQuantization]:
    """Restores a prepared model's plain layers, with their weights on the grid, and returns the grids by layer name.

    Raises:
        CompressError: A layer has no input grid yet, or the model has no quantized layer.
    """
    quantization: dict[str, LayerQuantization] = {}
    scales_by_weight: dict[int, Tensor] = {}  # a table tied to a decoder's head is rounded once
    layers = find_quantized_layers(model)
    for name, layer in layers.items():
        if id(layer.weight) not in scales_by_weight:
            scales_by_weight[id(layer.weight)] = scales = layer.compute_weight_scales().detach().clone()
            layer.weight.data = fake_quantize_weight(layer.weight, scales, layer.number_format)
        scales = scales_by_weight[id(layer.weight)]
        if isinstance(layer, QuantizedLinear):
            quantization[name] = LayerQuantization(layer.scheme, scales, _read_grid(name, layer))
        else:
            quantization[name] = LayerQuantization(None, scales)
    restore_plain_layers(model, list(layers))
    if not quantization:
        raise CompressError(
            f"quantize: expected a model that was prepared by `prepare_quantized`, found no quantized layer in "
            f"{type(model).__name__}: there is nothing to convert"
        )
    return quantization


def requantize(model: nn.Module, quantization: ModelQuantization) -> None:
    """Quantizes a converted model again with the scales it was converted with: the reference for deployed files.

    Raises:
        CompressError: The model lacks one of the layers.
    """
    layers = dict(model.named_modules())
    for name, quantized in quantization.items():
        layer = layers.get(name)
        if quantized.scheme is None and isinstance(layer, nn.Embedding):
            replace_module(model, name, rebuild_embedding(QuantizedEmbedding, layer))
        elif quantized.scheme is not None and isinstance(layer, nn.Linear):
            rebuilt = QuantizedLinear.from_linear(layer, quantized.scheme)
            rebuilt.scales = quantized.scales
            rebuilt.grid = _build_grid(*quantized.grid) if quantized.grid is not None else None
            replace_module(model, name, rebuilt)
        else:
            raise CompressError(
                f"quantize: expected a model with layer {name!r}, found {type(model).__name__} without it: the scales "
                "belong to another model"
            )


def learn_scales(model: nn.Module) -> None:
    """Makes the weight scales of a model from `prepare_quantized` trainable, see `QuantizedLinear.learn_scales`."""
    for layer in find_quantized_linears(model).values():
        if not is_tied_to_embedding(model, layer):
            layer.learn_scales()


def find_lowest_precision(quantization: ModelQuantization) -> str:
    """Returns the lowest precision of the quantized linear layers: int4, fp8 or int8."""
    precisions = {quantized.scheme.precision for quantized in quantization.values() if quantized.scheme is not None}
    return min(precisions, key=_PRECISIONS.index, default="int8")


def find_quantizable_layers(model: nn.Module, keep: tuple[str, ...] = ()) -> dict[str, nn.Linear | nn.Embedding]:
    """Returns the linear layers and embedding tables that can be quantized.

    Excluded are tables that do more than look up rows (Gemma 3's multiplies them) or whose rows are single numbers, no
    larger than a scale, layers that match `keep`, and any layer that shares its weight with one of these.

    Raises:
        CompressError: The model has Conv1D layers, which hold most of its weights.
    """
    layers: dict[str, nn.Linear | nn.Embedding] = {}
    excluded: set[int] = set()
    for name, layer in model.named_modules():
        if type(layer).__name__ == "Conv1D":
            raise CompressError(
                f"quantize: expected linear layers, found Conv1D {name!r}: only the head of {type(model).__name__} "
                "would be quantized; use a family with linear layers, such as Llama or Qwen"
            )
        if isinstance(layer, nn.Linear | nn.Embedding):
            layers[name] = layer
            is_kept = isinstance(layer, nn.Embedding) and (
                type(layer).forward is not nn.Embedding.forward or layer.embedding_dim == 1
            )
            if is_kept or any(fnmatch(name, pattern) for pattern in keep):
                excluded.add(id(layer.weight))
    return {name: layer for name, layer in layers.items() if id(layer.weight) not in excluded}


def is_tied_to_embedding(model: nn.Module, layer: nn.Module) -> bool:
    """Returns whether the layer shares its weight with an embedding table, whose grid it then uses."""
    return any(isinstance(m, nn.Embedding) and m.weight is layer.weight for m in model.modules())


def check_unquantized(model: nn.Module) -> None:
    """Checks that the model has neither quantized weights nor quantized layers.

    Raises:
        CompressError: The model is quantized already.
    """
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None:
        raise CompressError(
            f"quantize: expected a float checkpoint, found {type(model).__name__} with quantization_config {config}: "
            "rounding quantized weights again would lose more accuracy"
        )
    quantized = next(iter(find_quantized_layers(model)), None)
    if quantized is not None:
        raise CompressError(
            f"quantize: expected plain layers, found quantized layer {quantized}: convert the model "
            "(`convert_quantized`) before you prepare it again"
        )


def restore_plain_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Replaces quantized layers by plain ones with the same parameters, in place."""
    for name in names:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            replace_module(model, name, rebuild_linear(nn.Linear, layer))
        elif isinstance(layer, nn.Embedding):
            replace_module(model, name, rebuild_embedding(nn.Embedding, layer))


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module in the place of the model's submodule of this name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _choose_tied_head_scheme(scheme: Scheme, reduce_range: bool) -> Scheme:
    """Returns the scheme for a head that shares its weight with an embedding table, which has 8-bit integers."""
    if scheme.is_float8 or reduce_range:  # no kernel multiplies integers by 8-bit floats
        return Scheme("int8-weights")
    return dataclasses.replace(scheme, bits=8, group=0)


def _check_finite(name: str, weight: Tensor) -> None:
    wrong = int((~torch.isfinite(weight)).sum())
    if wrong:
        raise CompressError(
            f"quantize: expected finite values in {name}.weight, found {wrong} that are NaN or infinite: they can't be "
            "quantized"
        )


def _read_grid(name: str, layer: QuantizedLinear) -> tuple[float, int] | None:
    if layer.scheme.input_scales != "tensor":
        return None
    if layer.grid is None:
        raise CompressError(
            f"quantize: expected calibrated inputs of {name}, found no input range: `calibrate` the model before "
            "converting it"
        )
    return float(layer.grid.scale.abs()), int(layer.grid.zero)


def _build_grid(scale: float, zero_point: int) -> InputGrid:
    grid = InputGrid(torch.zeros(()), torch.zeros(()))
    grid.scale.fill_(scale)
    grid.zero.fill_(zero_point)
    return grid
