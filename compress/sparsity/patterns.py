"""Masks from scores: the weights of a pattern that stay."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.errors import CompressError
from compress.sparsity.schedule import SparsitySchedule

Masks = dict[str, Tensor]  # name of a weight -> bool [output, input], True for weights that stay


def choose_masks(scores: Mapping[str, Tensor], config: SparsitySchedule, share: float) -> Masks:
    """Returns masks that remove round(share * n) of n units: the lowest-scoring of each row, each layer, or all layers.

    A unit is a weight, or a block with the sum of its weights' scores. In an N:M pattern only the M - N lowest of a
    group can be removed, so a share below 1 - N/M leaves some groups dense. Among equal scores the first is removed.

    Args:
        scores: Name -> scores [output, input].
        config: Pattern and scope.
        share: Share of the units to remove, from 0 to the pattern's final share.

    Raises:
        CompressError: The pattern doesn't divide a size, or a score is NaN.
    """
    units = {name: _compute_unit_scores(name, score, config) for name, score in scores.items()}
    if config.ranking_scope == "global":
        joined = torch.cat([unit.flatten() for unit in units.values()])[None]
        parts = drop_lowest(joined, round(share * joined.numel()))[0].split([unit.numel() for unit in units.values()])
        unit_masks = {name: part.view_as(unit) for (name, unit), part in zip(units.items(), parts, strict=True)}
    else:
        unit_masks = {}
        for name, unit in units.items():
            groups = unit if config.ranking_scope == "row" else unit.reshape(1, -1)
            unit_masks[name] = drop_lowest(groups, round(share * groups.shape[1])).view_as(unit)
    return {name: expand_units(mask, config.block) for name, mask in unit_masks.items()}


def check_divisible(name: str, weight: Tensor, config: SparsitySchedule) -> None:
    """Checks that the pattern divides the weight, which would otherwise stay dense, fully or in part.

    Raises:
        CompressError: The pattern doesn't divide the weight's shape.
    """
    rows, columns = config.divisors
    for dim, size, axis in ((0, rows, "outputs"), (1, columns, "inputs")):
        if weight.shape[dim] % size:
            raise CompressError(
                f"weight {name!r}: expected a number of {axis} divisible by {size}, found {weight.shape[dim]}: pattern "
                f"{config.pattern} doesn't fit; exclude this layer with `select`"
            )


def find_lowest_of_groups(score: Float[Tensor, "out in"], size: int, count: int) -> Bool[Tensor, "out in"]:
    """Returns True for the `count` lowest of every `size` adjacent inputs; among equals the first."""
    groups = score.reshape(-1, size)
    return ~drop_lowest(groups, count).view_as(score)


def drop_lowest(scores: Float[Tensor, "groups units"], count: int) -> Bool[Tensor, "groups units"]:
    """Returns False for the `count` lowest of each group, True elsewhere; among equals the first are removed."""
    if not count:
        return torch.ones_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(count, dim=1, keepdim=True).values  # a full sort takes three times as long
    lower, equal = scores < threshold, scores == threshold
    remaining = count - lower.sum(1, keepdim=True)
    return ~(lower | equal & (equal.cumsum(1) <= remaining))


def sum_blocks(values: Float[Tensor, "out in"], block: tuple[int, int]) -> Float[Tensor, "units_out units_in"]:
    """Returns the sum of the values in each block of (outputs, inputs)."""
    rows, columns = block
    if block == (1, 1):
        return values
    return values.reshape(len(values) // rows, rows, -1, columns).sum((1, 3))


def expand_units(units: Bool[Tensor, "units_out units_in"], block: tuple[int, int]) -> Bool[Tensor, "out in"]:
    """Returns each unit's value at every weight of its block of (outputs, inputs)."""
    rows, columns = block
    return units.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _compute_unit_scores(
    name: str, score: Float[Tensor, "out in"], config: SparsitySchedule
) -> Float[Tensor, "units_out units_in"]:
    """Returns the scores of a weight's units; +inf for weights that an N:M pattern protects."""
    check_divisible(name, score, config)
    score = score.float()
    if score.isnan().any():
        raise CompressError(f"weight {name!r}: expected numbers as scores, found NaN: the lowest can't be determined")
    if config.n_m is None:
        return sum_blocks(score, config.block)
    n, m = config.n_m
    return score.masked_fill(~find_lowest_of_groups(score, m, m - n), torch.inf)
