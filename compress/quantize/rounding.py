"""A model made to round by its settings, in the order in which the steps build on one another."""

from collections.abc import Sequence

import torch
from torch import nn

from compress.errors import CompressError
from compress.quantize.config import QuantizeConfig
from compress.quantize.folds import find_folds
from compress.quantize.prepare import check_plain, prepare
from compress.quantize.ranges import Batch, calibrate
from compress.quantize.schemes import scheme_of
from compress.quantize.smooth import awq, smooth


@torch.no_grad()
def round_model(model: nn.Module, config: QuantizeConfig, batches: Sequence[Batch], *, seed: int = 0) -> list[str]:
    """Scales channels where that is asked for, puts layers that round in their places, and tells the ranges of what
    these read. GPTQ, which changes weights for good, is left to the end (`gptq_model`).

    Args:
        model: In float32 and eval mode; changed in place.
        config: How.
        batches: Calibration inputs with `attention_mask`.
        seed: Of the values that ranges are told from.

    Returns:
        Names of the layers that round.

    Raises:
        CompressError: A model that can't be rounded, or texts that nothing can be told from.
    """
    texts = sum(len(batch["input_ids"]) for batch in batches)
    if texts < 2:
        raise CompressError(
            f"quantize: expected at least 2 texts to calibrate on, found {texts}: ranges would be those of its words"
        )
    check_plain(model)
    scheme = scheme_of(config.scheme)
    if config.smooth or config.weights == "awq":
        folds = find_folds(model, batches[0])
        if config.smooth:
            smooth(model, folds, batches, config.smooth)
        if config.weights == "awq":
            awq(model, folds, batches, {n: scheme for n, m in model.named_modules() if isinstance(m, nn.Linear)})
    names = prepare(model, scheme, keep=config.kept)
    calibrate(model, batches, config.ranges, learned=config.learned, seed=seed)
    return names
