"""Quantization of a model by its settings, with the steps in the order in which they depend on one another."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.quantize.config import QuantizeConfig
from compress.quantize.folds import find_folds
from compress.quantize.prepare import check_plain, prepare, rounded_layers
from compress.quantize.ranges import Batch, calibrate
from compress.quantize.schemes import reduced_scheme, scheme_of
from compress.quantize.smooth import awq, smooth

ROUNDED = (nn.Linear, nn.Embedding)


@torch.enable_grad()
def unused_layers(model: nn.Module, batches: Iterable[Batch]) -> list[str]:
    """Returns layers that don't affect the model's outputs, such as an unused pooler: exported graphs omit them."""
    layers: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, ROUNDED)}
    frozen = [each.weight for each in layers.values() if not each.weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    for batch in batches:
        said = [each.float().sum() for each in model(**batch).values() if isinstance(each, Tensor)]
        weights = [each.weight for each in layers.values()]
        moved = torch.autograd.grad(torch.stack(said).sum(), weights, allow_unused=True)
        layers = {name: each for (name, each), slope in zip(layers.items(), moved, strict=True) if slope is None}
        if not layers:
            break
    for weight in frozen:
        weight.requires_grad_(False)
    return list(layers)


@torch.no_grad()
def quantize_model(model: nn.Module, config: QuantizeConfig, batches: Sequence[Batch], *, seed: int = 0) -> list[str]:
    """Rescales channels if requested, puts quantized layers in place, and calibrates the ranges of their inputs.

    GPTQ, which changes weights permanently, comes later (`gptq_model`).

    Args:
        model: In float32 and eval mode; changed in place.
        config: Settings. `reduced` auto depends on the exported files and means 8 bits here: `resolve_reduced` settles
            it beforehand.
        batches: Calibration inputs with `attention_mask`.
        seed: Seed of the sample from which ranges are estimated.

    Returns:
        Names of the quantized layers.

    Raises:
        CompressError: The model can't be quantized, or there are too few texts to calibrate on.
    """
    texts = sum(len(batch["input_ids"]) for batch in batches)
    if texts < 2:
        raise CompressError(
            f"quantize: expected at least 2 texts to calibrate on, found {texts}: ranges would be those of its words"
        )
    check_plain(model)
    scheme = scheme_of(config.scheme)
    in_7_bits = config.reduced is True
    scheme = reduced_scheme(scheme) if in_7_bits else scheme
    keep = (*config.kept, *unused_layers(model, batches))
    if config.smooth or config.weights == "awq":
        folds = find_folds(model, batches[0])
        if config.smooth:
            smooth(model, folds, batches, config.smooth)
        if config.weights == "awq":
            linears = [n for n, m in rounded_layers(model, keep).items() if isinstance(m, nn.Linear)]
            awq(model, folds, batches, dict.fromkeys(linears, scheme))
    names = prepare(model, scheme, keep=keep, in_7_bits=in_7_bits)
    calibrate(model, batches, config.ranges, learned=config.learned, seed=seed)
    return names
