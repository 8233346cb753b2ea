"""Channel scales that make rounding more accurate: SmoothQuant for activations, AWQ for weights."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.quantize.folds import Fold, apply_scales, tie_scales, weight_of
from compress.quantize.grid import fake_quantize_weight, weight_scales
from compress.quantize.ranges import Batch, InputObserver, drop_padding
from compress.quantize.schemes import Scheme

HALF = 0.5  # SmoothQuant's default alpha
SHARES = [i / 20 for i in range(21)]  # exponents that AWQ tries
KEPT = 512  # sampled tokens for AWQ's errors
LEAST = 1e-4  # lower bound, so that a channel of zeros has a finite scale


class ChannelStatistics(InputObserver):
    """Statistics of fold inputs: largest and mean magnitude per channel, and a sample of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.count: dict[str, int] = {}
        self.some: dict[str, Tensor] = {}

    def read(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = drop_padding(inputs[0].detach(), self.mask).float().flatten(0, -2)
        most, total = rows.abs().amax(0), rows.abs().sum(0)
        self.most[name] = torch.maximum(self.most.get(name, most), most)
        self.sums[name] = self.sums.get(name, torch.zeros_like(total)) + total
        self.count[name] = self.count.get(name, 0) + len(rows)
        kept = self.some.get(name, rows[:0])
        self.some[name] = torch.cat([kept, rows[: KEPT - len(kept)]]) if len(kept) < KEPT else kept

    def mean(self, name: str) -> Tensor:
        return self.sums[name] / self.count[name]


def watch(model: nn.Module, folds: Sequence[Fold], batches: Iterable[Batch]) -> ChannelStatistics:
    """Runs the batches and returns statistics of the inputs of each fold's readers.

    Raises:
        CompressError: There are no texts.
    """
    seen, firsts = ChannelStatistics(), [fold.readers[0] for fold in folds]
    texts = seen.watch(model, {name: model.get_submodule(name) for name in firsts}, batches)
    if folds and not texts:
        raise CompressError("smooth: expected some texts, found none: no channel is known to be large")
    return seen


@torch.no_grad()
def smooth(model: nn.Module, folds: Sequence[Fold], batches: Iterable[Batch], alpha: float = HALF) -> None:
    """Moves activation outliers into the weights that multiply them, in place; the model's function is preserved.

    Source: SmoothQuant, Xiao et al. 2023 (arXiv 2211.10438), equation 4.
    """
    seen = watch(model, folds, batches)
    for fold in folds:
        most = seen.most[fold.readers[0]]
        weights = torch.stack([weight_of(model, name).abs().amax(0) for name in fold.readers]).amax(0)
        scales = most.clamp(min=LEAST) ** alpha / weights.clamp(min=LEAST) ** (1 - alpha)
        apply_scales(model, fold, tie_scales(normalize_scales(scales), model, fold))


@torch.no_grad()
def awq(model: nn.Module, folds: Sequence[Fold], batches: Iterable[Batch], schemes: Mapping[str, Scheme]) -> None:
    """Gives weights that multiply large inputs finer steps, in place; the model's function in float is preserved.

    The scales are the channels' mean magnitudes to the power in SHARES whose rounded products have the smallest error.

    Source: AWQ, Lin et al. 2024 (arXiv 2306.00978), section 3.2; without its search for clipping thresholds.

    Args:
        model: In float, changed in place.
        folds: Places where scales can be absorbed.
        batches: Calibration inputs.
        schemes: Scheme of each linear layer.
    """
    seen = watch(model, folds, batches)
    for fold in folds:
        readers = [name for name in fold.readers if name in schemes]
        if not readers:
            continue
        mean, tokens = seen.mean(fold.readers[0]).clamp(min=LEAST), seen.some[fold.readers[0]]
        tried = [tie_scales(normalize_scales(mean**share), model, fold) for share in SHARES]
        errors = [
            sum(product_error(weight_of(model, name), tokens, scales, schemes[name]) for name in readers)
            for scales in tried
        ]
        apply_scales(model, fold, tried[min(range(len(errors)), key=lambda i: errors[i])])


def product_error(weight: Tensor, tokens: Tensor, scales: Tensor, scheme: Scheme) -> float:
    """Returns the mean squared error of the products of tokens [tokens, inputs] with the scaled, rounded weight."""
    scaled = weight * scales
    rounded = fake_quantize_weight(scaled, weight_scales(scaled, scheme.numbers, scheme.group), scheme.numbers) / scales
    return float((tokens @ (rounded - weight).T).square().mean())


def normalize_scales(scales: Tensor) -> Tensor:
    """Returns scales normalised around 1; the grid's own scales absorb their overall size."""
    return (scales / (scales.amax() * scales.amin()).sqrt()).clamp(min=LEAST)
