"""GPTQ: weights are rounded one input at a time, and the weights not yet rounded compensate for the error.

Source: Frantar et al. 2023 (arXiv 2210.17323), algorithm 1. Inputs are processed in decreasing order of energy ("act
order"). Scales are computed from the original weights, so that groups stay contiguous.
"""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.blocks import by_block
from compress.errors import CompressError
from compress.quantize.grid import nearest_
from compress.quantize.layers import QuantizedLinear
from compress.quantize.prepare import is_tied
from compress.quantize.ranges import Batch, InputObserver, drop_padding
from compress.quantize.schemes import Numbers

DAMP = 0.01  # share of the mean energy added to the diagonal: near-constant inputs make it singular
BLOCK = 128  # inputs between two lazy updates of the remaining weights


def gptq(
    weight: Float[Tensor, "rows inputs"],
    energy: Float[Tensor, "inputs inputs"],
    scales: Float[Tensor, "rows groups"],
    numbers: Numbers,
) -> Float[Tensor, "rows inputs"]:
    """Returns the weight on its grid, with approximately the least squared error of its products.

    Args:
        weight: Weight of a linear layer.
        energy: Sum of x xᵀ over the layer's inputs x.
        scales: Scales of equally sized groups of inputs.
        numbers: Values that a weight can take, in units of its scale.

    Raises:
        CompressError: The inputs aren't finite.
    """
    order = energy.diagonal().argsort(descending=True, stable=True)
    spread = inverse_factor("gptq", energy[order][:, order], DAMP).to(weight.dtype)
    steps = scales.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)[:, order]
    left, done = weight.detach()[:, order].clone(), torch.empty_like(weight)
    for start in range(0, left.shape[1], BLOCK):
        stop = min(start + BLOCK, left.shape[1])
        errors = left.new_zeros(len(left), stop - start)
        for i in range(start, stop):
            rounded = nearest_(left[:, i] / steps[:, i], numbers) * steps[:, i]
            error = (left[:, i] - rounded) / spread[i, i]
            left[:, i:stop] -= error[:, None] * spread[i, i:stop]
            done[:, i], errors[:, i - start] = rounded, error
        left[:, stop:] -= errors @ spread[start:stop, stop:]
    return torch.empty_like(done).index_copy_(1, order, done)


def inverse_factor(
    whose: str, energy: Float[Tensor, "inputs inputs"], damping: float
) -> Float[Tensor, "inputs inputs"]:
    """Returns the upper Cholesky factor of the inverse of the damped energy, in float64.

    An input that is always 0 is decoupled from all others.

    Args:
        whose: Name of the layer, for error messages.
        energy: Sum of x xᵀ over the layer's inputs x.
        damping: Added to the diagonal, as a share of its mean.

    Raises:
        CompressError: The damped energy isn't invertible.
    """
    damped = energy.double().clone()
    diagonal = damped.diagonal()  # a view
    diagonal[diagonal == 0] = 1
    diagonal += damping * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed or not lower.isfinite().all():
        raise CompressError(
            f"{whose}: expected finite inputs and damping above 0, found damping {damping:g} and inputs whose energy "
            "has no inverse: nothing could make up for an error"
        )
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)


class Energies(InputObserver):
    """Hooks that accumulate x xᵀ over layer inputs; layers that take the same tensor share a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Tensor] = {}

    def read(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.note(name, module, inputs)
        if self.first[name] == name:
            rows = drop_padding(inputs[0], self.mask).float().flatten(0, -2)
            self.sums[name] = self.sums.get(name, torch.zeros(())) + rows.T @ rows

    def of(self, name: str) -> Tensor:
        return self.sums[self.first[name]]


@torch.no_grad()
def gptq_model(
    model: nn.Module, batches: Iterable[Batch], on_block: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Rounds the weights of a `prepare`d model block by block, on inputs computed by the already rounded blocks before.

    Args:
        model: In eval mode; changed in place. Its scales are fixed from here on.
        batches: Calibration inputs with `attention_mask`.
        on_block: Called with the number of finished blocks and the total.

    Returns:
        Number of quantized linear layers in the model.
    """
    kept, layers = list(batches), {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    if not kept:
        raise CompressError("gptq: expected some texts, found none: there is no error to make up for")
    blocks = by_block(layers)
    for number, block in enumerate(blocks, 1):
        seen = Energies()
        seen.watch(model, block, kept)
        for name, layer in block.items():
            if name in seen.first and not is_tied(model, layer):
                layer.scales = layer.weight_scales().clone()
                layer.weight.data = gptq(layer.weight.detach(), seen.of(name), layer.scales, layer.numbers)
        on_block(number, len(blocks))
    return len(layers)
