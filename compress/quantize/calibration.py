"""Activation ranges from calibration texts: minimum and maximum, percentiles, or least squared rounding error."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.layer_inputs import CalibrationBatch, InputObserver, drop_padding
from compress.quantize.grid import compute_tensor_grid
from compress.quantize.layers import InputGrid, find_quantized_linears
from compress.quantize.schemes import LARGEST_LEVEL
from distill.eval_mode import eval_mode

RangeMethod = Literal["minmax", "percentile", "mse"]
SAMPLED_VALUES = 2**16  # per layer input, for percentiles and errors
TAIL = 1e-4  # share of the values beyond each end of a percentile's range
RANGE_SHARES = torch.linspace(0.3, 1.0, 71)  # shares of the extremes that mse tries as ranges


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[CalibrationBatch],
    method: RangeMethod = "minmax",
    *,
    learned: bool = False,
    seed: int = 0,
) -> int:
    """Sets the input grid of every layer whose scheme needs one; layers that take the same tensor share a grid.

    Padding isn't counted. The model is in eval mode during calibration.

    Args:
        model: A model from `prepare_quantized`.
        batches: Mappings of its inputs.
        method: The range: `minmax`; `percentile`, all but 1 in 10,000 values at each end; `mse`, least squared error.
        learned: Whether the scales will be trained.
        seed: Seed of the sample that percentile and mse use.

    Returns:
        Number of texts.

    Raises:
        CompressError: There is no text, an input isn't finite, or no batch reaches one of the layers.
    """
    layers = {
        name: layer for name, layer in find_quantized_linears(model).items() if layer.scheme.input_scales == "tensor"
    }
    observer = _RangeObserver(seed)
    previous = {name: layer.grid for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.grid = None  # ranges are those of unrounded values
        with eval_mode(model):
            texts = observer.run(model, layers, batches)
    finally:
        for name, layer in layers.items():
            layer.grid = previous[name]
    if not texts:
        raise CompressError("calibration: expected at least one text, found none: no input range can be determined")
    missing = [name for name in layers if name not in observer.first_consumers]
    if missing:
        raise CompressError(
            f"layer {missing[0]!r}: expected calibration batches that reach it, found none: its input range is unknown"
        )
    grids = {
        name: InputGrid(*_check_finite_range(name, statistics.compute_range(method)), learned=learned).to(
            layers[name].weight.device
        )
        for name, statistics in observer.statistics.items()
    }
    for name, layer in layers.items():
        layer.grid = grids[observer.first_consumers[name]]
    return texts


class InputStatistics:
    """Statistics of a layer's inputs: minimum, maximum, and a uniform sample of SAMPLED_VALUES values.

    Args:
        seed: Seed of the sample.
    """

    def __init__(self, seed: int):
        self.low = self.high = torch.zeros(())
        self.values, self._ranks = torch.empty(0), torch.empty(0)
        self._generator = torch.Generator().manual_seed(seed)

    def update(self, values: Tensor) -> None:
        """Updates the extremes and the sample, which keeps the lowest random ranks: all values are equally likely."""
        flat = values.detach().float().flatten().cpu()
        self.low, self.high = torch.minimum(self.low, flat.min()), torch.maximum(self.high, flat.max())
        ranks = torch.rand(len(flat), generator=self._generator)
        values, ranks = torch.cat([self.values, flat]), torch.cat([self._ranks, ranks])
        if len(ranks) > SAMPLED_VALUES:
            ranks, selected = ranks.topk(SAMPLED_VALUES, largest=False)
            values = values[selected]
        self.values, self._ranks = values, ranks

    def compute_range(self, method: RangeMethod) -> tuple[Tensor, Tensor]:
        """Returns the smallest and the largest value of the range that a method chooses, both scalars."""
        if method == "minmax":
            return self.low, self.high
        if method == "percentile":
            low, high = torch.quantile(self.values, torch.tensor([TAIL, 1 - TAIL]))
            return low, high
        return min(
            ((share * self.low, share * self.high) for share in RANGE_SHARES),
            key=lambda ends: float(compute_rounding_error(self.values, *ends)),
        )


def compute_rounding_error(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Returns the sum of squared rounding errors on the grid from `low` to `high`."""
    scale, zero_point = compute_tensor_grid(low, high)
    levels = ((values / scale).round() + zero_point).clamp(0, LARGEST_LEVEL) - zero_point
    return (levels * scale - values).square().sum()


class _RangeObserver(InputObserver):
    """Collects statistics of layer inputs once per shared tensor, under the name of its first consumer."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.statistics: dict[str, InputStatistics] = {}

    def observe(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().observe(name, module, inputs)
        if self.first_consumers[name] == name:
            statistics = self.statistics.setdefault(name, InputStatistics(self.seed))
            statistics.update(drop_padding(inputs[0], self.mask))


def _check_finite_range(name: str, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not all(torch.isfinite(end) for end in ends):
        raise CompressError(
            f"calibration: expected finite inputs of {name}, found values from {ends[0]:g} to {ends[1]:g}: they can't "
            "be quantized"
        )
    return ends
