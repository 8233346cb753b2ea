"""GPTQ: weights are rounded one input at a time, and the weights not yet rounded compensate for the error.

Source: Frantar et al. 2023 (arXiv 2210.17323), algorithm 1. Inputs are processed in decreasing order of their squared
norm ("act order"). Scales are computed from the original weights, so that groups stay contiguous.
"""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.blocks import group_by_block
from compress.errors import CompressError
from compress.layer_inputs import CalibrationBatch, InputSums
from compress.quantize.grid import round_to_nearest_
from compress.quantize.layers import find_quantized_linears
from compress.quantize.prepare import is_tied_to_embedding
from compress.quantize.schemes import NumberFormat

_DAMPING = 0.01  # share of the diagonal's mean added to the diagonal: near-constant inputs make the matrix singular
LAZY_INPUTS = 128  # inputs between two lazy updates of the remaining weights


@torch.no_grad()
def apply_gptq(
    model: nn.Module,
    batches: Iterable[CalibrationBatch],
    on_block: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Rounds the weights of a model from `prepare_quantized` block by block.

    Each block is rounded on inputs that the already rounded blocks before it have computed.

    Args:
        model: In eval mode; changed in place. Its scales are fixed from here on.
        batches: Calibration inputs with `attention_mask`.
        on_block: Called with the number of finished blocks and the total.

    Returns:
        Number of quantized linear layers in the model.

    Raises:
        CompressError: There are no texts, or the inputs of a layer aren't finite.
    """
    stored_batches, layers = list(batches), find_quantized_linears(model)
    if not stored_batches:
        raise CompressError("gptq: expected at least one calibration batch, found none: rounding errors are unknown")
    blocks = group_by_block(layers)
    for number, block in enumerate(blocks, 1):
        grams = InputSums(_compute_gram, share=True)
        grams.run(model, block, stored_batches)
        for name, layer in block.items():
            if name in grams.first_consumers and not is_tied_to_embedding(model, layer):
                layer.scales = layer.compute_weight_scales().clone()
                layer.weight.data = round_with_gptq(
                    layer.weight.detach(), grams.get_sum(name), layer.scales, layer.number_format
                )
        on_block(number, len(blocks))
    return len(layers)


def round_with_gptq(
    weight: Float[Tensor, "rows inputs"],
    gram: Float[Tensor, "inputs inputs"],
    scales: Float[Tensor, "rows groups"],
    number_format: NumberFormat,
) -> Float[Tensor, "rows inputs"]:
    """Returns the weight on its grid, with approximately the least squared error of its products.

    Args:
        weight: Weight of a linear layer.
        gram: Gram matrix of the layer's inputs: the sum of x xᵀ.
        scales: Scales of equally sized groups of inputs.
        number_format: Values that a weight can take, in units of its scale.

    Raises:
        CompressError: The inputs aren't finite.
    """
    order = gram.diagonal().argsort(descending=True, stable=True)
    factor = factor_inverse_gram("gptq", gram[order][:, order], _DAMPING).to(weight.dtype)
    steps = scales.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)[:, order]
    remaining, result = weight.detach()[:, order].clone(), torch.empty_like(weight)
    for start in range(0, remaining.shape[1], LAZY_INPUTS):
        stop = min(start + LAZY_INPUTS, remaining.shape[1])
        errors = remaining.new_zeros(len(remaining), stop - start)
        for i in range(start, stop):
            rounded = round_to_nearest_(remaining[:, i] / steps[:, i], number_format) * steps[:, i]
            error = (remaining[:, i] - rounded) / factor[i, i]
            remaining[:, i:stop] -= error[:, None] * factor[i, i:stop]
            result[:, i], errors[:, i - start] = rounded, error
        remaining[:, stop:] -= errors @ factor[start:stop, stop:]
    return torch.empty_like(result).index_copy_(1, order, result)


def factor_inverse_gram(
    name: str, gram: Float[Tensor, "inputs inputs"], damping: float
) -> Float[Tensor, "inputs inputs"]:
    """Returns the upper Cholesky factor of the inverse of the damped Gram matrix, in float64.

    An input that is always 0 is decoupled from all others.

    Args:
        name: Name of the layer, for error messages.
        gram: Gram matrix of the layer's inputs: the sum of x xᵀ.
        damping: Added to the diagonal, as a share of its mean.

    Raises:
        CompressError: The damped matrix isn't invertible.
    """
    damped = gram.double().clone()
    diagonal = damped.diagonal()  # a view
    diagonal[diagonal == 0] = 1
    diagonal += damping * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed or not lower.isfinite().all():
        raise CompressError(
            f"{name}: expected finite inputs with an invertible Gram matrix, found one that can't be inverted with "
            f"damping {damping:g}: errors can't be compensated"
        )
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor


def _compute_gram(rows: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "inputs inputs"]:
    rows = rows.float()
    return rows.T @ rows
