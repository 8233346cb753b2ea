"""Export of torchao checkpoints with the model's exact integers as torchao tensors, for stock `from_pretrained`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, TorchAoConfig

from compress.export.common.huggingface import WEIGHTS
from compress.export.common.source import Source
from compress.quantize.prepare import LayerQuantization
from distill.checkpoint.custom_models import save_model_folder


def export_torchao(source: Source, folder: Path) -> None:
    """Writes safetensors with the model's integers and scales, and a config that declares them.

    8-bit linear layers become torchao's Int8Tensor, with byte products if the scheme rounds the inputs, or
    Float8Tensor; 4-bit layers and embedding tables become IntxUnpackedToInt8Tensor, one byte per number: on a CPU this
    format is for interchange, not for speed.

    Args:
        source: A quantized model.
        folder: Where to write.
    """
    from torchao.quantization import IntxWeightOnlyConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    model, quantization = build_torchao_model(source), source.quantization
    assert quantization is not None
    plain = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding) and n not in quantization]
    # The weights are quantized already, so the scheme that the config must name is never applied.
    settings = TorchAoConfig(
        IntxWeightOnlyConfig(), modules_to_not_convert=plain or None, include_input_output_embeddings=True
    )
    model.config.quantization_config = settings
    cast(Any, model).hf_quantizer = TorchAoHfQuantizer(settings, pre_quantized=True)
    save_model_folder(model, folder)
    remove_tied_weights(folder / WEIGHTS, list(getattr(model, "all_tied_weights_keys", None) or {}))


def remove_tied_weights(file: Path, shared: Sequence[str]) -> None:
    """Removes weights tied to another from the file.

    transformers would compare both on loading, and torchao's tensors can't be compared.
    """
    from safetensors.torch import load_file, save_file

    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata())
    names = json.loads(metadata["tensor_names"])
    removed = {name for name in shared if name in names}
    if not removed:
        return
    prefixes = tuple("{}._{}_".format(*name.rsplit(".", 1)) for name in removed)
    tensors = {name: value for name, value in load_file(file).items() if not name.startswith(prefixes)}
    metadata = {name: value for name, value in metadata.items() if name not in removed}
    metadata["tensor_names"] = json.dumps([name for name in names if name not in removed])
    save_file(tensors, file, metadata=metadata)


def build_torchao_model(source: Source) -> PreTrainedModel:
    """Returns a copy of the model with torchao tensors in place of the quantized weights."""
    import copy

    assert source.quantization is not None
    model, parameters, quantization = copy.deepcopy(source.model), dict[int, nn.Parameter](), source.quantization
    for name in sorted(quantization, key=lambda name: quantization[name].scheme is not None):  # tables first
        layer: Any = model.get_submodule(name)
        weight = layer.weight
        if id(weight) not in parameters:  # a tied head stays tied to the token table
            tensor = build_torchao_tensor(weight.detach(), quantization[name])
            parameters[id(weight)] = nn.Parameter(tensor, requires_grad=False)
        layer.weight = parameters[id(weight)]
    return model


def build_torchao_tensor(weight: Tensor, quantized: LayerQuantization) -> Tensor:
    """Returns a quantized weight as a torchao tensor."""
    if quantized.scheme is None or quantized.scheme.stored_bits == 4:
        return unpacked_tensor(weight, quantized)
    return float_tensor(weight, quantized) if quantized.scheme.is_float8 else byte_tensor(weight, quantized)


def byte_tensor(weight: Tensor, quantized: LayerQuantization) -> Tensor:
    """Returns a weight of 8-bit integers as a torchao tensor."""
    from torchao.quantization import Int8Tensor, MappingType, PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    scheme = quantized.scheme
    assert scheme is not None
    inputs = QuantizeTensorToInt8Kwargs(granularity=PerRow(), mapping_type=MappingType.ASYMMETRIC)
    result: Tensor = Int8Tensor(
        quantized.quantize(weight),
        quantized.scales.clone(),
        [1, weight.shape[1] // quantized.scales.shape[1]],
        torch.float32,
        zero_point=build_zero_points(quantized),
        act_quant_kwargs=inputs if scheme.input_scales == "token" else None,
    )
    return result


def float_tensor(weight: Tensor, quantized: LayerQuantization) -> Tensor:
    """Returns a weight of 8-bit floats as a torchao tensor."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    scheme, products = quantized.scheme, Float8MMConfig(use_fast_accum=True)
    assert scheme is not None
    inputs = QuantizeTensorToFloat8Kwargs(granularity=PerRow(), mm_config=products)
    result: Tensor = Float8Tensor(
        quantized.quantize(weight),
        quantized.scales.clone(),
        [1, weight.shape[1]],
        products,
        inputs if scheme.input_scales == "token" else None,
        dtype=torch.float32,
    )
    return result


def unpacked_tensor(weight: Tensor, quantized: LayerQuantization, *, inputs: Any = None) -> Tensor:
    """Returns the weight as unpacked int8; `inputs` is torchao's activation quantization."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    bits = 8 if quantized.scheme is None else quantized.scheme.stored_bits
    result: Tensor = IntxUnpackedToInt8Tensor(
        quantized.quantize(weight),
        quantized.scales.clone(),
        build_zero_points(quantized),
        getattr(torch, f"int{bits}"),
        (1, weight.shape[1] // quantized.scales.shape[1]),
        torch.float32,
        inputs,
    )
    return result


def build_zero_points(quantized: LayerQuantization) -> Tensor:
    """Returns the zero points of symmetric scales."""
    return torch.zeros_like(quantized.scales, dtype=torch.int8)
