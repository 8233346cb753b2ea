"""SparseGPT: later weights of a row compensate for each removed weight."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.quantize.gptq import factor_inverse_gram
from compress.sparsity.patterns import check_divisible, drop_lowest, find_lowest_of_groups
from compress.sparsity.schedule import SparsitySchedule

BLOCK_INPUTS = 128  # inputs whose mask is chosen together: the paper's block size
DAMPING = 0.01  # share of the mean of the diagonal, as in the paper


def prune_with_sparsegpt(
    name: str,
    weight: Float[Tensor, "out in"],
    gram: Float[Tensor, "in in"],
    config: SparsitySchedule,
    *,
    block_inputs: int = BLOCK_INPUTS,
    damping: float = DAMPING,
) -> tuple[Float[Tensor, "out in"], Bool[Tensor, "out in"]]:
    """Returns the pruned weight and its mask, with a small sum of squares of (W - W_pruned) X.

    Inputs are processed in order. The importance of a weight w of input j is w²/c_j², where c is the diagonal of the
    Cholesky factor C (upper, C^T C = H^-1) and H the damped Gram matrix; the lowest of each block of inputs are
    removed. Removing w subtracts w/c_j * C[j, j:] from its row: the optimal update of the weights that are still to
    come.

    Args:
        name: Name of the weight, for error messages.
        weight: W.
        gram: X X^T of its inputs, summed over tokens.
        config: Pattern (single weights or N:M), share and scope; `row` removes the same number from each row.
        block_inputs: Inputs per block.
        damping: Added to the diagonal, as a share of its mean.

    Raises:
        CompressError: The pattern doesn't divide the weight, or the Gram matrix isn't invertible.

    Source: Frantar & Alistarh 2023 (arXiv 2301.00774), algorithm 1; in float64, and with per-block counts rounded so
    that the layer's total is exact. All weights of an input that is always 0 become 0.
    """
    check_divisible(name, weight, config)
    work, factor = weight.double().clone(), factor_inverse_gram(f"weight {name!r}", gram, damping)
    work[:, gram.diagonal() == 0] = 0
    mask = torch.ones_like(work, dtype=torch.bool)
    step = max(block_inputs // config.n_m[1], 1) * config.n_m[1] if config.n_m else block_inputs
    for begin in range(0, work.shape[1], step):
        end = min(begin + step, work.shape[1])
        if not config.n_m:
            mask[:, begin:end] = _choose_block_mask(work, factor, begin, end, config)
        errors = _prune_block(work, factor, mask, begin, end, config)
        work[:, end:] -= errors @ factor[begin:end, end:]
    return work.to(weight.dtype).masked_fill(~mask, 0), mask


def _choose_block_mask(
    work: Tensor, factor: Tensor, begin: int, end: int, config: SparsitySchedule
) -> Bool[Tensor, "out block"]:
    """Returns the mask of the block's remaining weights; the counts of all blocks add up to round(share * n)."""
    importance = (work[:, begin:end] / factor.diagonal()[begin:end]).square()
    groups = importance if config.ranking_scope == "row" else importance.reshape(1, -1)
    per_input = groups.shape[1] // (end - begin)  # units per group at each input
    count = round(config.final_share * per_input * end) - round(config.final_share * per_input * begin)
    return drop_lowest(groups, count).view_as(importance)


def _prune_block(
    work: Tensor, factor: Tensor, mask: Tensor, begin: int, end: int, config: SparsitySchedule
) -> Float[Tensor, "out block"]:
    """Removes the block's weights outside the mask, in place; N:M masks are chosen here, group by group.

    Returns each removed weight divided by its input's c.
    """
    errors = torch.zeros_like(work[:, begin:end])
    for j in range(begin, end):
        if config.n_m and (j - begin) % config.n_m[1] == 0:
            n, m = config.n_m
            importance = (work[:, j : j + m] / factor.diagonal()[j : j + m]).square()
            mask[:, j : j + m] = ~find_lowest_of_groups(importance, m, m - n)
        error = (work[:, j] / factor[j, j]).masked_fill(mask[:, j], 0)
        work[:, j:end] -= error[:, None] * factor[j, j:end]
        errors[:, j - begin] = error
    return errors
