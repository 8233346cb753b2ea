"""Layers that simulate their deployed form: weights on a grid, and inputs rounded where the scheme does so."""

from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.quantize.grid import (
    SMALLEST,
    fake_quantize,
    fake_quantize_float8,
    fake_quantize_tokens,
    fake_quantize_weight,
    near_float_tie,
    near_tie,
    tensor_grid,
    token_grid,
    weight_scales,
)
from compress.quantize.schemes import INT8, Numbers, Scheme
from compress.quantize.sharing import RoundingCache, products_dtype

TOKENS = RoundingCache()  # shared by all layers with per-token scales: they round alike
FLOATS = RoundingCache()  # shared by those whose inputs are 8-bit floats


L = TypeVar("L", bound=nn.Linear)
E = TypeVar("E", bound=nn.Embedding)


def linear_as(kind: type[L], layer: nn.Linear) -> L:
    """Returns a linear layer of class `kind` that shares the layer's parameters."""
    with torch.device("meta"):
        made = kind(layer.in_features, layer.out_features, layer.bias is not None)
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def table_as(kind: type[E], table: nn.Embedding) -> E:
    """Returns an embedding of class `kind` that shares the table's weight."""
    with torch.device("meta"):
        made = kind(table.num_embeddings, table.embedding_dim, table.padding_idx)
    made.weight = table.weight
    return made.train(table.training)


class InputGrid(nn.Module):
    """Scale and zero point of an input tensor, of one layer or several, as for queries, keys and values.

    Args:
        low, high: Smallest and largest value of the grid.
        learned: Whether the scale is trained.
    """

    scale: Tensor
    zero: Tensor

    def __init__(self, low: Tensor, high: Tensor, *, learned: bool = False):
        super().__init__()
        scale, zero = tensor_grid(low.float(), high.float())
        self.register_buffer("zero", zero)
        self.sharing = RoundingCache()
        if learned:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input on the grid, in the dtype that matrix products use."""
        return self.sharing.of(x, lambda: fake_quantize(x, self.scale.abs(), self.zero, products_dtype(x)), self.scale)


class QuantizedLinear(nn.Linear):
    """Linear layer whose weights, and inputs if the scheme rounds them, are on a grid; parameter names don't change.

    Until calibration sets `grid`, a scheme with per-tensor scales leaves the inputs unrounded.
    """

    scheme: Scheme
    grid: InputGrid | None
    scales: Tensor | None
    stretch: nn.Parameter | None
    rounds = True  # False: computes as a plain layer for now

    @classmethod
    def of(cls, layer: nn.Linear, scheme: Scheme) -> "QuantizedLinear":
        """Returns a quantized layer that shares the layer's parameters."""
        made = linear_as(cls, layer)
        made.scheme, made.grid, made.stretch = scheme, None, None
        made.register_buffer("scales", None, persistent=False)
        return made

    def learn_scales(self) -> None:
        """Fixes the scales to those of the current weights, each times a trainable factor.

        The factor starts at 1, so that an Adam step moves each scale by the same small fraction, whatever its size.
        """
        self.scales = self.weight_scales()
        self.stretch = nn.Parameter(torch.ones(self.scales.numel()))  # 1-D, so that weight decay skips it

    @property
    def numbers(self) -> Numbers:
        return self.scheme.numbers

    def weight_scales(self) -> Tensor:
        """Returns scales [outputs, groups]: the stored ones, or those of the current weights."""
        if self.stretch is not None and self.scales is not None:
            return deployed_scales(self.scales, self.stretch.view_as(self.scales), self.scheme.group)
        if self.scales is not None:
            return self.scales
        return weight_scales(self.weight.detach(), self.numbers, self.scheme.group)

    def rounded_weight(self) -> Tensor:
        return fake_quantize_weight(self.weight, self.weight_scales(), self.numbers, products_dtype(self.weight))

    def rounded_input(self, x: Tensor) -> Tensor:
        if self.scheme.inputs == "token":
            sharing, on_rows = (FLOATS, fake_quantize_float8) if self.scheme.floats else (TOKENS, fake_quantize_tokens)
            return sharing.of(x, lambda: on_rows(x, products_dtype(x)))
        return x if self.grid is None else cast(Tensor, self.grid(x))

    def near_tie(self, x: Tensor, within: float) -> Tensor:
        """Returns a mask of the rows [...] of `x` [..., inputs] that have a value near a rounding tie."""
        if self.scheme.inputs == "token":
            near = near_float_tie(x, within) if self.scheme.floats else near_tie(x, token_grid(x)[0], within)
            return near.any(-1)
        if self.grid is not None:
            return near_tie(x, self.grid.scale.abs(), within).any(-1)
        return torch.zeros(x.shape[:-1], dtype=torch.bool)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
        if not self.rounds:
            return F.linear(input, self.weight, self.bias)
        return F.linear(self.rounded_input(input), self.rounded_weight(), self.bias)


def deployed_scales(scales: Tensor, stretch: Tensor, group: int) -> Tensor:
    """Returns scales as deployed: group scales in bfloat16, with a straight-through gradient."""
    found = (scales * stretch).abs().clamp(min=SMALLEST)
    return found + (found.bfloat16().float() - found).detach() if group else found


class QuantizedEmbedding(nn.Embedding):
    """Token or position table in 8 bits with per-row scales; only the rows of a batch are rounded."""

    numbers = INT8
    rounds = True  # False: looks up as a plain table for now

    def weight_scales(self) -> Tensor:
        """Returns the scales, [rows, 1]."""
        return weight_scales(self.weight.detach(), INT8)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Embedding
        rows = super().forward(input)
        if not self.rounds:
            return rows
        flat = rows.reshape(-1, rows.shape[-1])
        return fake_quantize_weight(flat, weight_scales(flat.detach(), INT8), INT8).view(rows.shape)
