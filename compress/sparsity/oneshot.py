"""One-shot sparsification without training, from the weights alone or with calibration data."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from compress.blocks import group_by_block
from compress.errors import CompressError
from compress.layer_inputs import CalibrationBatch, sum_layer_inputs
from compress.sparsity.layers import LayerFilter, find_sparsifiable_layers
from compress.sparsity.patterns import Masks, check_divisible, choose_masks
from compress.sparsity.schedule import SparsitySchedule
from compress.sparsity.sparsegpt import prune_with_sparsegpt


@torch.no_grad()
def sparsify(
    model: nn.Module,
    config: SparsitySchedule,
    batches: Iterable[CalibrationBatch] | None = None,
    *,
    select: LayerFilter | None = None,
) -> Masks:
    """Sets weights of the model to exact zeros, in place; the steps of `config` are ignored.

    Wanda and SparseGPT go block by block, so that the inputs of a block are computed by the sparse blocks before it.

    Args:
        model: Any module with linear layers.
        config: Pattern, amount and score.
        batches: Calibration data for wanda and sparsegpt: keyword arguments of the model, held in memory; padding is
            skipped if there is an `attention_mask` [batch, length].
        select: Filter for linear layers; see `find_sparsifiable_layers`.

    Returns:
        Name of each weight -> bool [output, input], True for weights that stay; `prepare_sparse` accepts it.

    Raises:
        CompressError: The score is movement, which needs training; the score needs calibration data and there is none;
            or the pattern doesn't divide a shape.

    Source: Sun et al. 2023, Wanda (arXiv 2306.11695), equation 1 and algorithm 1; the norm runs over all real tokens.
    """
    layers = find_sparsifiable_layers(model, select)
    for name, layer in layers.items():
        check_divisible(f"{name}.weight", layer.weight, config)
    if config.score == "movement":
        raise CompressError(
            "sparsity.score: expected magnitude, wanda or sparsegpt with `sparsify`, found movement: its scores come "
            "from training; use `prepare_sparse`"
        )
    if config.score == "magnitude":
        return _remove_lowest(layers, {name: layer.weight.abs() for name, layer in layers.items()}, config)
    stored_batches = list(batches or ())
    if not stored_batches:
        raise CompressError(
            f"sparsity.score {config.score}: expected calibration batches, found none: the layers' inputs are unknown"
        )
    prune_block = _prune_with_wanda if config.score == "wanda" else _prune_with_sparsegpt
    masks: Masks = {}
    for block in group_by_block(layers):
        masks |= prune_block(model, block, stored_batches, config)
    return masks


def _prune_with_wanda(
    model: nn.Module, layers: Mapping[str, nn.Linear], batches: list[CalibrationBatch], config: SparsitySchedule
) -> Masks:
    squares = sum_layer_inputs(model, layers, batches, lambda rows: rows.square().sum(0))
    scores = {name: layer.weight.abs().double() * squares[name].sqrt() for name, layer in layers.items()}
    return _remove_lowest(layers, scores, config)


def _prune_with_sparsegpt(
    model: nn.Module, layers: Mapping[str, nn.Linear], batches: list[CalibrationBatch], config: SparsitySchedule
) -> Masks:
    grams = sum_layer_inputs(model, layers, batches, lambda rows: rows.T @ rows)
    masks = {}
    for name, layer in layers.items():
        pruned, mask = prune_with_sparsegpt(f"{name}.weight", layer.weight, grams[name], config)
        layer.weight.copy_(pruned)
        masks[f"{name}.weight"] = mask
    return masks


def _remove_lowest(layers: Mapping[str, nn.Linear], scores: Mapping[str, Tensor], config: SparsitySchedule) -> Masks:
    """Sets the weights with the lowest scores [output, input] to zero, in place, and returns the masks."""
    masks = choose_masks({f"{name}.weight": score for name, score in scores.items()}, config, config.final_share)
    for name, layer in layers.items():
        layer.weight.masked_fill_(~masks[f"{name}.weight"], 0)
    return masks
