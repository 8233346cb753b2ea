"""Export of compressed-tensors checkpoints with the model's exact integers, for vLLM and stock `from_pretrained`."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compress.export.common.quiet import quiet
from compress.export.common.source import Source
from compress.export.common.targets import check_installed
from compress.quantize.prepare import LayerQuantization
from compress.quantize.schemes import Scheme
from distill.checkpoint.custom_models import save_model_folder

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

LEAST = -128  # smallest byte in compressed-tensors; input grids here start at 0


@torch.no_grad()
def export_compressed(source: Source, folder: Path) -> None:
    """Writes safetensors with packed integers, scales and zero points, and a config that declares them.

    Linear layers are quantized; embedding tables are floats on their grid, since vLLM supports no others. A head tied
    to the token table gets integers of its own.

    Args:
        source: A quantized model.
        folder: Where to write.

    Raises:
        CompressError: compressed-tensors isn't installed.
    """
    check_installed(["compressed-tensors"])
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config

    assert source.quantization is not None
    model = untie_heads(copy.deepcopy(source.model))
    quantization = {name: quantized for name, quantized in source.quantization.items() if quantized.scheme is not None}
    with quiet():
        apply_quantization_config(model, describe_config(model, quantization))
        for name, quantized in quantization.items():
            copy_scales(model.get_submodule(name), quantized)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        save_model_folder(model, folder)
        compressor.update_config(folder)


def untie_heads(model: PreTrainedModel) -> PreTrainedModel:
    """Unties heads from embedding tables, in place, and returns the model."""
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and id(layer.weight) in tables:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
            model.config.tie_word_embeddings = False
    return model


def describe_config(model: nn.Module, quantization: Mapping[str, LayerQuantization]) -> "QuantizationConfig":
    """Returns a config that lists linear layers by class if all have one scheme, else by name."""
    from compressed_tensors.quantization import QuantizationConfig

    layers: dict[Scheme, list[str]] = {}
    for name, quantized in quantization.items():
        assert quantized.scheme is not None
        layers.setdefault(quantized.scheme, []).append(name)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    alike = len(layers) == 1
    groups = {
        f"group_{number}": describe_group(scheme, ["Linear"] if alike else names)
        for number, (scheme, names) in enumerate(layers.items())
    }
    ignored = [name for name in linear if name not in quantization]
    return QuantizationConfig(config_groups=groups, ignore=ignored, quantization_status="frozen")


def describe_group(scheme: Scheme, targets: list[str]) -> "QuantizationScheme":
    """Returns the scheme of some layers in the terms of compressed-tensors."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    numbers: dict[str, Any] = {"strategy": "group", "group_size": scheme.group} if scheme.group else {}
    kind = "float" if scheme.is_float8 else "int"
    weights = QuantizationArgs(num_bits=scheme.stored_bits, type=kind, **{"strategy": "channel"} | numbers)
    inputs = None
    if scheme.input_scales != "float":
        inputs = QuantizationArgs(
            type=kind, symmetric=scheme.is_float8, strategy=scheme.input_scales, dynamic=scheme.input_scales == "token"
        )
    packed = scheme.stored_bits == 4 or (inputs is None and not scheme.is_float8)
    form = "pack-quantized" if packed else f"{kind}-quantized"
    return QuantizationScheme(targets=targets, weights=weights, input_activations=inputs, format=form)


def copy_scales(layer: Any, quantized: LayerQuantization) -> None:
    """Copies the trained scales and zero points into the layer."""
    layer.weight_scale.copy_(quantized.scales)
    layer.weight_zero_point.zero_()
    if quantized.grid is not None:
        scale, zero = quantized.grid
        layer.input_scale.fill_(scale)
        layer.input_zero_point.fill_(zero + LEAST)
