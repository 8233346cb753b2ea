"""Activation ranges from calibration texts: minimum and maximum, percentiles, or least squared rounding error."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.quantize.grid import LEVELS, tensor_grid
from compress.quantize.layers import InputGrid, QuantizedLinear

Method = Literal["minmax", "percentile", "mse"]
Batch = Mapping[str, Tensor]
KEPT = 2**16  # sampled values per layer input, for percentiles and errors
TAIL = 1e-4  # share of the values beyond each end of a percentile's range
SHARES = torch.linspace(0.3, 1.0, 71)  # shares of the extremes that mse tries as ranges


class InputStatistics:
    """Statistics of a layer's inputs: minimum, maximum, and a uniform sample of KEPT values."""

    def __init__(self, seed: int):
        self.low = self.high = torch.zeros(())
        self.values, self.ranks = torch.empty(0), torch.empty(0)
        self.seeded = torch.Generator().manual_seed(seed)

    def add(self, values: Tensor) -> None:
        """Updates the extremes and the sample, which keeps the lowest random ranks: all values are equally likely."""
        flat = values.detach().float().flatten().cpu()
        self.low, self.high = torch.minimum(self.low, flat.min()), torch.maximum(self.high, flat.max())
        ranks = torch.rand(len(flat), generator=self.seeded)
        values, ranks = torch.cat([self.values, flat]), torch.cat([self.ranks, ranks])
        if len(ranks) > KEPT:
            ranks, chosen = ranks.topk(KEPT, largest=False)
            values = values[chosen]
        self.values, self.ranks = values, ranks

    def range(self, method: Method) -> tuple[Tensor, Tensor]:
        if method == "minmax":
            return self.low, self.high
        if method == "percentile":
            ends = torch.tensor([TAIL, 1 - TAIL])
            low, high = torch.quantile(self.values, ends)
            return low, high
        return min(
            ((share * self.low, share * self.high) for share in SHARES),
            key=lambda ends: float(rounding_error(self.values, *ends)),
        )


class InputObserver:
    """Forward pre-hooks on layers; this base class records which layers take the same tensor in succession.

    `first` maps a layer to the first layer that took the same tensor; `mask` [batch, tokens] is that of the current
    batch.
    """

    def __init__(self) -> None:
        self.mask = torch.ones(0, 0, dtype=torch.bool)
        self.first: dict[str, str] = {}
        self.last: tuple[Tensor | None, str] = None, ""

    def note(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0] is not self.last[0]:
            self.last = inputs[0], name
        self.first.setdefault(name, self.last[1])

    read = note  # called before each forward pass of a layer

    @torch.no_grad()
    def watch(self, model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Batch]) -> int:
        """Runs the model on the batches and returns the number of texts."""
        texts = 0
        hooks = [layer.register_forward_pre_hook(partial(self.read, name)) for name, layer in layers.items()]
        try:
            for batch in batches:
                self.mask = batch["attention_mask"].bool()
                model(**batch)
                texts += len(self.mask)
        finally:
            for hook in hooks:
                hook.remove()
        return texts


class RangeObserver(InputObserver):
    """Collects layer inputs once per shared tensor; `seen` maps the first layer that took it to its statistics."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.seen: dict[str, InputStatistics] = {}

    def read(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.note(name, module, inputs)
        if self.first[name] == name:
            self.seen.setdefault(name, InputStatistics(self.seed)).add(drop_padding(inputs[0], self.mask))


def rounding_error(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Returns the sum of squared rounding errors of the grid from `low` to `high`."""
    scale, zero = tensor_grid(low, high)
    rounded = ((values / scale).round() + zero).clamp(0, LEVELS) - zero
    return (rounded * scale - values).square().sum()


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[Batch], method: Method = "minmax", *, learned: bool = False, seed: int = 0
) -> int:
    """Sets the input grid of every layer whose scheme needs one; layers that take the same tensor share a grid.

    Padding isn't counted. The model is in eval mode during calibration.

    Args:
        model: A `prepare`d model.
        batches: Mappings of its inputs.
        method: The range: `minmax`; `percentile`, all but 1 in 10,000 values at each end; `mse`, least squared error.
        learned: Whether the scales will be trained.
        seed: Seed of the sample that percentile and mse use.

    Returns:
        Number of texts.

    Raises:
        CompressError: There is no text, or an input isn't finite.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear) and m.scheme.inputs == "tensor"}
    reader = RangeObserver(seed)
    mode = model.training
    grids = {name: layer.grid for name, layer in layers.items()}
    try:
        model.eval()
        for layer in layers.values():
            layer.grid = None  # ranges are those of unrounded values
        texts = reader.watch(model, layers, batches)
    finally:
        for name, layer in layers.items():
            layer.grid = grids[name]
        model.train(mode)
    if not texts:
        raise CompressError("calibration: expected some texts, found none: no range can be told")
    found = {
        name: InputGrid(*check_finite_range(name, seen.range(method)), learned=learned)
        for name, seen in reader.seen.items()
    }
    for name, layer in layers.items():
        layer.grid = found[reader.first[name]]
    return texts


def same_inputs(model: nn.Module, layers: Mapping[str, nn.Module], batch: Batch) -> dict[str, str]:
    """Returns each layer that the model calls -> the first layer that took the same tensor in succession."""
    reader = InputObserver()
    reader.watch(model, layers, [batch])
    return reader.first


def drop_padding(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the values of tokens that aren't padding, or all values if there is no token axis, as after pooling."""
    return values[mask] if values.shape[:-1] == mask.shape else values


def check_finite_range(name: str, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not all(torch.isfinite(end) for end in ends):
        raise CompressError(
            f"calibration: {name} reads values from {ends[0]:g} to {ends[1]:g}, expected finite ones: no grid has them"
        )
    return ends
