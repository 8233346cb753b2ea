"""Ranges of activations from calibration texts: the extremes, a percentile, or the least squared error of rounding."""

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
KEPT = 2**16  # values of a layer's input that percentiles and errors are told from
TAIL = 1e-4  # share of the values beyond each end of a percentile's range
SHARES = torch.linspace(0.3, 1.0, 71)  # of the extremes, the ranges that are tried for the least error


class Seen:
    """What a layer reads: its extremes, and an even draw of KEPT of its values."""

    def __init__(self, seed: int):
        self.low = self.high = torch.zeros(())
        self.values, self.ranks = torch.empty(0), torch.empty(0)
        self.seeded = torch.Generator().manual_seed(seed)

    def add(self, values: Tensor) -> None:
        """Keeps the values of the lowest random ranks: every value seen has the same chance."""
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


class Reader:
    """Watches layers read; this one notes which of them read the same tensor in a row.

    `first` maps a layer to the first of them, and `mask` [batch, tokens] is that of the batch under way.
    """

    def __init__(self) -> None:
        self.mask = torch.ones(0, 0, dtype=torch.bool)
        self.first: dict[str, str] = {}
        self.last: tuple[Tensor | None, str] = None, ""

    def note(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0] is not self.last[0]:
            self.last = inputs[0], name
        self.first.setdefault(name, self.last[1])

    read = note  # what is done each time a layer reads

    @torch.no_grad()
    def watch(self, model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Batch]) -> int:
        """Runs the model on the batches; returns how many texts were seen."""
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


class ValueReader(Reader):
    """Notes what layers read, once for those that read the same; `seen` maps the first of them to its values."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.seen: dict[str, Seen] = {}

    def read(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.note(name, module, inputs)
        if self.first[name] == name:
            self.seen.setdefault(name, Seen(self.seed)).add(words(inputs[0], self.mask))


def rounding_error(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Sum of squares of what the grid from `low` to `high` changes."""
    scale, zero = tensor_grid(low, high)
    rounded = ((values / scale).round() + zero).clamp(0, LEVELS) - zero
    return (rounded * scale - values).square().sum()


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[Batch], method: Method = "minmax", *, learned: bool = False, seed: int = 0
) -> int:
    """Gives every layer whose scheme wants one the grid of its inputs; layers that read the same tensor share one.

    Padding isn't counted. The model is in eval mode meanwhile.

    Args:
        model: A `prepare`d model.
        batches: Mappings of its inputs.
        method: The range: `minmax`; `percentile`, all but 1 in 10,000 values at each end; `mse`, least squared error.
        learned: The scales will be trained.
        seed: Of the values that percentile and mse are told from.

    Returns:
        How many texts were seen.

    Raises:
        CompressError: No text, or values that aren't finite.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear) and m.scheme.inputs == "tensor"}
    reader = ValueReader(seed)
    mode = model.training
    grids = {name: layer.grid for name, layer in layers.items()}
    try:
        model.eval()
        for layer in layers.values():
            layer.grid = None  # ranges are those of the values before they are rounded
        texts = reader.watch(model, layers, batches)
    finally:
        for name, layer in layers.items():
            layer.grid = grids[name]
        model.train(mode)
    if not texts:
        raise CompressError("calibration: expected some texts, found none: no range can be told")
    found = {name: InputGrid(*checked(name, seen.range(method)), learned=learned) for name, seen in reader.seen.items()}
    for name, layer in layers.items():
        layer.grid = found[reader.first[name]]
    return texts


def same_inputs(model: nn.Module, layers: Mapping[str, nn.Module], batch: Batch) -> dict[str, str]:
    """Each layer that the model calls -> the first of those that read the same tensor in a row."""
    reader = Reader()
    reader.watch(model, layers, [batch])
    return reader.first


def words(values: Tensor, mask: Tensor) -> Tensor:
    """The values of tokens that aren't padding; all of a tensor without tokens, such as a pooled one."""
    return values[mask] if values.shape[:-1] == mask.shape else values


def checked(name: str, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not all(torch.isfinite(end) for end in ends):
        raise CompressError(
            f"calibration: {name} reads values from {ends[0]:g} to {ends[1]:g}, expected finite ones: no grid has them"
        )
    return ends
