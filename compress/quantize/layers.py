"""Layers that simulate their deployed form: weights on a grid, and inputs rounded where the scheme does so."""

from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.quantize.fake_quantize import (
    fake_quantize_float8,
    fake_quantize_groups,
    fake_quantize_tensor,
    fake_quantize_tokens,
    fake_quantize_weight,
)
from compress.quantize.grid import (
    compute_tensor_grid,
    compute_token_grid,
    compute_weight_scales,
    is_near_float8_tie,
    is_near_tie,
    split_inputs,
)
from compress.quantize.rounding_cache import RoundingCache, find_product_dtype
from compress.quantize.schemes import INT8, SMALLEST_SCALE, NumberFormat, Scheme

_TOKEN_CACHE = RoundingCache()  # shared by all layers with per-token scales: they round alike
_GROUP_CACHE = RoundingCache()  # shared by those with a scale per group of inputs
_FLOAT8_CACHE = RoundingCache()  # shared by those whose inputs are 8-bit floats

LinearClass = TypeVar("LinearClass", bound=nn.Linear)
EmbeddingClass = TypeVar("EmbeddingClass", bound=nn.Embedding)


def rebuild_linear(layer_class: type[LinearClass], layer: nn.Linear) -> LinearClass:
    """Returns a linear layer of another class that shares the layer's parameters."""
    with torch.device("meta"):
        rebuilt = layer_class(layer.in_features, layer.out_features, layer.bias is not None)
    rebuilt.weight, rebuilt.bias = layer.weight, layer.bias
    return rebuilt.train(layer.training)


def rebuild_embedding(table_class: type[EmbeddingClass], table: nn.Embedding) -> EmbeddingClass:
    """Returns an embedding table of another class that shares the table's weight."""
    with torch.device("meta"):
        rebuilt = table_class(table.num_embeddings, table.embedding_dim, table.padding_idx)
    rebuilt.weight = table.weight
    return rebuilt.train(table.training)


class InputGrid(nn.Module):
    """Scale and zero point of an input tensor, of one layer or several, as for queries, keys and values.

    Args:
        low: Smallest value of the grid.
        high: Largest value of the grid.
        learned: Whether the scale is trained.
    """

    scale: Tensor
    zero: Tensor

    def __init__(self, low: Tensor, high: Tensor, *, learned: bool = False):
        super().__init__()
        scale, zero_point = compute_tensor_grid(low.float(), high.float())
        self.register_buffer("zero", zero_point)
        self.cache = RoundingCache()
        if learned:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input on the grid, in the dtype that matrix products use."""
        return self.cache.get_or_compute(
            x, lambda: fake_quantize_tensor(x, self.scale.abs(), self.zero, find_product_dtype(x)), self.scale
        )


class QuantizedLinear(nn.Linear):
    """Linear layer whose weights, and inputs if the scheme rounds them, are on a grid; parameter names don't change.

    Until calibration sets `grid`, a scheme with per-tensor scales leaves the inputs unrounded. While
    `fake_quant_enabled` is false the layer computes as a plain one.
    """

    scheme: Scheme
    grid: InputGrid | None
    scales: Tensor | None
    stretch: nn.Parameter | None
    fake_quant_enabled = True

    @classmethod
    def from_linear(cls, layer: nn.Linear, scheme: Scheme) -> "QuantizedLinear":
        """Returns a quantized layer that shares the layer's parameters."""
        quantized = rebuild_linear(cls, layer)
        quantized.scheme, quantized.grid, quantized.stretch = scheme, None, None
        quantized.register_buffer("scales", None, persistent=False)
        return quantized

    @property
    def number_format(self) -> NumberFormat:
        """Values that a weight can take, in units of its scale."""
        return self.scheme.number_format

    def learn_scales(self) -> None:
        """Fixes the scales to those of the current weights, each times a trainable factor.

        The factor starts at 1, so that an Adam step moves each scale by the same small fraction, whatever its size.
        """
        self.scales = self.compute_weight_scales()
        self.stretch = nn.Parameter(torch.ones_like(self.scales).flatten())  # 1-D, so that weight decay skips it

    def compute_weight_scales(self) -> Tensor:
        """Returns scales [outputs, groups]: the stored ones, or those of the current weights."""
        if self.stretch is not None and self.scales is not None:
            return _stretch_scales(self.scales, self.stretch.view_as(self.scales), self.scheme.group)
        if self.scales is not None:
            return self.scales
        group = self.scheme.find_group(self.in_features)
        return compute_weight_scales(self.weight.detach(), self.number_format, group)

    def round_weight(self) -> Tensor:
        """Returns the weight [outputs, inputs] on its grid, in the dtype that matrix products use."""
        scales = self.compute_weight_scales()
        return fake_quantize_weight(self.weight, scales, self.number_format, find_product_dtype(self.weight))

    def round_input(self, x: Tensor) -> Tensor:
        """Returns the input [..., inputs] on its grid, or unchanged if the scheme doesn't round it."""
        if self.scheme.input_scales == "token":
            if self.scheme.is_float8:
                return _FLOAT8_CACHE.get_or_compute(x, lambda: fake_quantize_float8(x, find_product_dtype(x)))
            return _TOKEN_CACHE.get_or_compute(x, lambda: fake_quantize_tokens(x, find_product_dtype(x)))
        if self.scheme.input_scales == "group":
            return _GROUP_CACHE.get_or_compute(x, lambda: fake_quantize_groups(x, find_product_dtype(x)))
        return x if self.grid is None else cast(Tensor, self.grid(x))

    def find_near_ties(self, x: Tensor, tolerance: float) -> Tensor:
        """Returns a mask [...] of the rows of `x` [..., inputs] with a value within `tolerance` steps of a tie."""
        if self.scheme.input_scales == "token":
            if self.scheme.is_float8:
                return is_near_float8_tie(x, tolerance).any(-1)
            return is_near_tie(x, compute_token_grid(x)[0], tolerance).any(-1)
        if self.scheme.input_scales == "group":
            groups, largest = split_inputs(x)
            return is_near_tie(groups, largest / INT8.largest, tolerance).any(-1).any(-1)
        if self.grid is not None:
            return is_near_tie(x, self.grid.scale.abs(), tolerance).any(-1)
        return torch.zeros(x.shape[:-1], dtype=torch.bool)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
        """Returns the product [..., outputs] of the rounded input [..., inputs] and weight, plus the bias."""
        if not self.fake_quant_enabled:
            return F.linear(input, self.weight, self.bias)
        return F.linear(self.round_input(input), self.round_weight(), self.bias)


class QuantizedEmbedding(nn.Embedding):
    """Token or position table in 8 bits with per-row scales; only the rows of a batch are rounded.

    While `fake_quant_enabled` is false the table is looked up as a plain one.
    """

    number_format = INT8
    fake_quant_enabled = True

    def compute_weight_scales(self) -> Tensor:
        """Returns the scales [rows, 1]."""
        return compute_weight_scales(self.weight.detach(), INT8)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Embedding
        """Returns the rounded rows [..., width] of the ids [...]."""
        rows = super().forward(input)
        if not self.fake_quant_enabled:
            return rows
        flat = rows.reshape(-1, rows.shape[-1])
        return fake_quantize_weight(flat, compute_weight_scales(flat.detach(), INT8), INT8).view(rows.shape)


QuantizedLayer = QuantizedLinear | QuantizedEmbedding


def find_quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Returns the quantized layers of a model by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def find_quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Returns the quantized linear layers of a model by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}


def _stretch_scales(scales: Tensor, stretch: Tensor, group: int) -> Tensor:
    """Returns scales times their factors as deployed: group scales in bfloat16, with a straight-through gradient."""
    stretched = (scales * stretch).abs().clamp(min=SMALLEST_SCALE)
    return stretched + (stretched.bfloat16().float() - stretched).detach() if group else stretched
