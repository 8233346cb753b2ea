"""One-shot sparsification without training, from the weights alone or with calibration data."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from compress.blocks import by_block
from compress.errors import CompressError
from compress.sparsity.config import Sparsity
from compress.sparsity.layers import Batch, Chosen, sparse_layers, sum_over_inputs
from compress.sparsity.patterns import Masks, check_shape, choose_masks
from compress.sparsity.sparsegpt import sparsegpt


@torch.no_grad()
def sparsify(
    model: nn.Module, config: Sparsity, batches: Iterable[Batch] | None = None, *, chosen: Chosen | None = None
) -> Masks:
    """Sets weights of the model to exact zeros, in place; the schedule of `config` is ignored.

    Wanda and SparseGPT go block by block, so that the inputs of a block are computed by the sparse blocks before it.

    Args:
        model: Any module with linear layers.
        config: Pattern, amount and score.
        batches: Calibration data for wanda and sparsegpt: keyword arguments of the model, held in memory; padding is
            skipped if there is an `attention_mask` [batch, length].
        chosen: Filter for linear layers; see `sparse_layers`.

    Returns:
        Name of each weight -> bool [output, input], True for weights that stay; `prepare` accepts it for training.

    Raises:
        CompressError: The score is movement, which needs training; the score needs calibration data and there is none;
            or the pattern doesn't divide a shape.

    Source: Sun et al. 2023, Wanda (arXiv 2306.11695), equation 1 and algorithm 1; the norm runs over all real tokens.
    """
    layers = sparse_layers(model, chosen)
    for name, layer in layers.items():
        check_shape(f"{name}.weight", layer.weight, config)
    if config.score == "movement":
        raise CompressError("sparsity.score: movement's scores come from training; use `prepare`, found `sparsify`")
    if config.score == "magnitude":
        masks = choose_masks(
            {f"{name}.weight": layer.weight.abs() for name, layer in layers.items()}, config, config.share
        )
        for name, layer in layers.items():
            layer.weight.masked_fill_(~masks[f"{name}.weight"], 0)
        return masks
    held = list(batches or ())
    if not held:
        raise CompressError(f"sparsity.score: {config.score} needs calibration batches, found none: inputs are unknown")
    masks = {}
    for stage in by_block(layers):
        masks |= (
            wanda_stage(model, stage, held, config)
            if config.score == "wanda"
            else sparsegpt_stage(model, stage, held, config)
        )
    return masks


def wanda_stage(model: nn.Module, layers: dict[str, nn.Linear], batches: list[Batch], config: Sparsity) -> Masks:
    squares = sum_over_inputs(model, layers, batches, lambda rows: rows.square().sum(0))
    scores = {f"{name}.weight": wanda_scores(layer.weight, squares[name]) for name, layer in layers.items()}
    masks = choose_masks(scores, config, config.share)
    for name, layer in layers.items():
        layer.weight.masked_fill_(~masks[f"{name}.weight"], 0)
    return masks


def wanda_scores(weight: Tensor, squares: Tensor) -> Tensor:
    """Returns |w_ij| times the norm of input j, from weight [output, input] and sums of squares [input]."""
    return weight.abs().double() * squares.sqrt()


def sparsegpt_stage(model: nn.Module, layers: dict[str, nn.Linear], batches: list[Batch], config: Sparsity) -> Masks:
    grams = sum_over_inputs(model, layers, batches, lambda rows: rows.T @ rows)
    masks = {}
    for name, layer in layers.items():
        pruned, masks[f"{name}.weight"] = sparsegpt(f"{name}.weight", layer.weight, grams[name], config)
        layer.weight.copy_(pruned)
    return masks
