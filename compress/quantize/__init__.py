"""Quantization of weights and activations, with training that simulates the deployed arithmetic and scales.

`prepare_quantized` and `calibrate`, or `quantize_model` by settings, put quantized layers in place; the model is then
trained or not; `convert_quantized` returns plain layers and the scales, and `requantize` restores the quantized layers
from them. Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.quantize.calibration import calibrate
    from compress.quantize.channel_scales import apply_awq, apply_smoothquant
    from compress.quantize.config import Processor, QuantizeConfig
    from compress.quantize.folds import Fold, find_folds
    from compress.quantize.gptq import apply_gptq
    from compress.quantize.layers import QuantizedEmbedding, QuantizedLinear
    from compress.quantize.model import quantize_model
    from compress.quantize.prepare import (
        LayerQuantization,
        ModelQuantization,
        convert_quantized,
        find_lowest_precision,
        learn_scales,
        prepare_quantized,
        requantize,
    )
    from compress.quantize.schemes import SCHEMES, Scheme, resolve_scheme
    from compress.quantize.sensitivity import Sensitivity, measure_sensitivities, widen_most_sensitive
    from compress.quantize.store import QUANTIZATION_FILE, is_quantized, load_quantization, save_quantization

EXPORTS = {
    "Fold": "folds",
    "LayerQuantization": "prepare",
    "ModelQuantization": "prepare",
    "Processor": "config",
    "QUANTIZATION_FILE": "store",
    "QuantizeConfig": "config",
    "QuantizedEmbedding": "layers",
    "QuantizedLinear": "layers",
    "SCHEMES": "schemes",
    "Scheme": "schemes",
    "Sensitivity": "sensitivity",
    "apply_awq": "channel_scales",
    "apply_gptq": "gptq",
    "apply_smoothquant": "channel_scales",
    "calibrate": "calibration",
    "convert_quantized": "prepare",
    "find_folds": "folds",
    "find_lowest_precision": "prepare",
    "is_quantized": "store",
    "learn_scales": "prepare",
    "load_quantization": "store",
    "measure_sensitivities": "sensitivity",
    "prepare_quantized": "prepare",
    "quantize_model": "model",
    "requantize": "prepare",
    "resolve_scheme": "schemes",
    "save_quantization": "store",
    "widen_most_sensitive": "sensitivity",
}
__all__ = [
    "QUANTIZATION_FILE",
    "SCHEMES",
    "Fold",
    "LayerQuantization",
    "ModelQuantization",
    "Processor",
    "QuantizeConfig",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "Scheme",
    "Sensitivity",
    "apply_awq",
    "apply_gptq",
    "apply_smoothquant",
    "calibrate",
    "convert_quantized",
    "find_folds",
    "find_lowest_precision",
    "is_quantized",
    "learn_scales",
    "load_quantization",
    "measure_sensitivities",
    "prepare_quantized",
    "quantize_model",
    "requantize",
    "resolve_scheme",
    "save_quantization",
    "widen_most_sensitive",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
