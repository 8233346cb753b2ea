"""Quantization of a model by its settings, with the steps in the order in which they depend on one another."""

import fnmatch
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.layer_inputs import CalibrationBatch
from compress.quantize.calibration import calibrate
from compress.quantize.channel_scales import apply_awq, apply_smoothquant
from compress.quantize.config import QuantizeConfig
from compress.quantize.folds import find_folds
from compress.quantize.prepare import check_unquantized, find_quantizable_layers, prepare_quantized
from compress.quantize.schemes import reduce_weight_range, resolve_scheme


@torch.no_grad()
def quantize_model(
    model: nn.Module, config: QuantizeConfig, batches: Sequence[CalibrationBatch], *, seed: int = 0
) -> list[str]:
    """Rescales channels if requested, puts quantized layers in place, and calibrates the ranges of their inputs.

    GPTQ, which changes weights permanently, comes later (`apply_gptq`).

    Args:
        model: In float32 and eval mode; changed in place.
        config: Settings. `reduce_range` auto depends on the exported files and means 8 bits here:
            `resolve_reduce_range` settles it beforehand.
        batches: Calibration inputs with `attention_mask`.
        seed: Seed of the sample from which ranges are estimated.

    Returns:
        Names of the quantized layers.

    Raises:
        CompressError: The model can't be quantized, a pattern of `float_layers` matches no layer, or there are too few
            texts to calibrate on.
    """
    texts = sum(len(batch["input_ids"]) for batch in batches)
    if texts < 2:
        raise CompressError(
            f"quantize: expected at least 2 texts to calibrate on, found {texts}: input ranges would fit that text only"
        )
    check_unquantized(model)
    check_float_patterns(model, config.float_patterns)
    scheme = resolve_scheme(config.scheme)
    reduce_range = config.reduce_range is True
    scheme = reduce_weight_range(scheme) if reduce_range else scheme
    keep = (*config.float_patterns, *find_unused_layers(model, batches))
    if config.smoothquant or config.rounding == "awq":
        folds = find_folds(model, batches[0])
        if config.smoothquant:
            apply_smoothquant(model, folds, batches, config.smoothquant)
        if config.rounding == "awq":
            linears = [n for n, m in find_quantizable_layers(model, keep).items() if isinstance(m, nn.Linear)]
            apply_awq(model, folds, batches, dict.fromkeys(linears, scheme))
    names = prepare_quantized(model, scheme, keep=keep, reduce_range=reduce_range)
    calibrate(model, batches, config.ranges, learned=config.learned_scales, seed=seed)
    return names


def check_float_patterns(model: nn.Module, patterns: Iterable[str]) -> None:
    """Checks that every pattern of layers that stay in float matches one.

    Raises:
        CompressError: A pattern matches none.
    """
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)]
    unmatched = next((pattern for pattern in patterns if not fnmatch.filter(names, pattern)), None)
    if unmatched is not None:
        raise CompressError(
            f"quantize.float_layers: expected patterns that match a layer, such as {names[-1]}, found {unmatched!r}: "
            "nothing would stay in float"
        )


@torch.enable_grad()
def find_unused_layers(model: nn.Module, batches: Iterable[CalibrationBatch]) -> list[str]:
    """Returns layers that don't affect the model's outputs, such as an unused pooler: exported graphs omit them."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)}
    frozen = [layer.weight for layer in layers.values() if not layer.weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    for batch in batches:
        outputs = [output.float().sum() for output in model(**batch).values() if isinstance(output, Tensor)]
        weights = [layer.weight for layer in layers.values()]
        gradients = torch.autograd.grad(torch.stack(outputs).sum(), weights, allow_unused=True)
        layers = {
            name: layer for (name, layer), gradient in zip(layers.items(), gradients, strict=True) if gradient is None
        }
        if not layers:
            break
    for weight in frozen:
        weight.requires_grad_(False)
    return list(layers)
