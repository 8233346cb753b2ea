"""Channel scales that make rounding more accurate: SmoothQuant for activations, AWQ for weights."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.layer_inputs import CalibrationBatch, InputObserver, flatten_unpadded
from compress.quantize.fake_quantize import fake_quantize_weight
from compress.quantize.folds import Fold, apply_scales, get_weight, tie_scales
from compress.quantize.grid import compute_weight_scales
from compress.quantize.schemes import Scheme

DEFAULT_ALPHA = 0.5  # of SmoothQuant
EXPONENTS = [i / 20 for i in range(21)]  # that AWQ tries
SAMPLED_TOKENS = 512  # for AWQ's errors
SMALLEST_MAGNITUDE = 1e-4  # lower bound, so that a channel of zeros has a finite scale


@torch.no_grad()
def apply_smoothquant(
    model: nn.Module, folds: Sequence[Fold], batches: Iterable[CalibrationBatch], alpha: float = DEFAULT_ALPHA
) -> None:
    """Moves activation outliers into the weights that multiply them, in place; the model's function is preserved.

    Args:
        model: In float, changed in place.
        folds: Places where scales can be absorbed.
        batches: Calibration inputs.
        alpha: How far outliers are moved, from 0 (not at all) to 1 (entirely).

    Raises:
        CompressError: There are no texts.

    Source: SmoothQuant, Xiao et al. 2023 (arXiv 2211.10438), equation 4.
    """
    statistics = _collect_statistics(model, folds, batches)
    for fold in folds:
        largest_inputs = statistics.largest[fold.consumers[0]].clamp(min=SMALLEST_MAGNITUDE)
        weights = torch.stack([get_weight(model, name).abs().amax(0) for name in fold.consumers]).amax(0)
        scales = largest_inputs**alpha / weights.clamp(min=SMALLEST_MAGNITUDE) ** (1 - alpha)
        apply_scales(model, fold, tie_scales(_normalize_scales(scales), model, fold))


@torch.no_grad()
def apply_awq(
    model: nn.Module, folds: Sequence[Fold], batches: Iterable[CalibrationBatch], schemes: Mapping[str, Scheme]
) -> None:
    """Gives weights that multiply large inputs finer steps, in place; the model's function in float is preserved.

    The scales are the channels' mean magnitudes to the power in EXPONENTS whose rounded products have the smallest
    error.

    Args:
        model: In float, changed in place.
        folds: Places where scales can be absorbed.
        batches: Calibration inputs.
        schemes: Scheme of each linear layer.

    Raises:
        CompressError: There are no texts.

    Source: AWQ, Lin et al. 2024 (arXiv 2306.00978), section 3.2; without its search for clipping thresholds.
    """
    statistics = _collect_statistics(model, folds, batches)
    for fold in folds:
        consumers = [name for name in fold.consumers if name in schemes]
        if not consumers:
            continue
        first = fold.consumers[0]
        means, tokens = statistics.compute_mean(first).clamp(min=SMALLEST_MAGNITUDE), statistics.tokens[first]
        candidates = [tie_scales(_normalize_scales(means**exponent), model, fold) for exponent in EXPONENTS]
        errors = [
            sum(_compute_error(get_weight(model, name), tokens, scales, schemes[name]) for name in consumers)
            for scales in candidates
        ]
        apply_scales(model, fold, candidates[min(range(len(errors)), key=lambda i: errors[i])])


class _ChannelStatistics(InputObserver):
    """Statistics of layer inputs: largest and mean magnitude per channel, and a sample of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def observe(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = flatten_unpadded(inputs[0].detach(), self.mask).float()
        largest, total = rows.abs().amax(0), rows.abs().sum(0)
        self.largest[name] = torch.maximum(self.largest.get(name, largest), largest)
        self._sums[name] = self._sums.get(name, torch.zeros_like(total)) + total
        self._counts[name] = self._counts.get(name, 0) + len(rows)
        tokens = self.tokens.get(name, rows[:0])
        missing = SAMPLED_TOKENS - len(tokens)
        self.tokens[name] = torch.cat([tokens, rows[:missing]]) if missing > 0 else tokens

    def compute_mean(self, name: str) -> Tensor:
        """Returns the mean magnitude of each channel, [inputs]."""
        return self._sums[name] / self._counts[name]


def _collect_statistics(
    model: nn.Module, folds: Sequence[Fold], batches: Iterable[CalibrationBatch]
) -> _ChannelStatistics:
    """Returns statistics of the inputs of each fold's consumers."""
    statistics = _ChannelStatistics()
    firsts = {fold.consumers[0]: model.get_submodule(fold.consumers[0]) for fold in folds}
    texts = statistics.run(model, firsts, batches)
    if folds and not texts:
        raise CompressError(
            "quantize: expected calibration texts for channel scales, found none: the channels' magnitudes are unknown"
        )
    return statistics


def _compute_error(weight: Tensor, tokens: Tensor, scales: Tensor, scheme: Scheme) -> float:
    """Returns the mean squared error of the products of tokens [tokens, inputs] with the scaled, rounded weight."""
    scaled = weight * scales
    weight_scales = compute_weight_scales(scaled, scheme.number_format, scheme.find_group(weight.shape[1]))
    rounded = fake_quantize_weight(scaled, weight_scales, scheme.number_format) / scales
    return float((tokens @ (rounded - weight).T).square().mean())


def _normalize_scales(scales: Tensor) -> Tensor:
    """Returns scales normalized around 1; the grid's own scales absorb their overall size."""
    return (scales / (scales.amax() * scales.amin()).sqrt()).clamp(min=SMALLEST_MAGNITUDE)
