"""Fake quantization: values rounded to a quantization grid in float, with gradients for training.

Rounding is always computed in float32, as when deployed; `dtype` is that of the result.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from compress.quantize.grid import compute_float8_scales, compute_token_grid, round_to_nearest_, split_inputs
from compress.quantize.schemes import FLOAT8, INT8, LARGEST_LEVEL, NumberFormat


def fake_quantize_weight(
    weight: Float[Tensor, "rows inputs"],
    scales: Float[Tensor, "rows groups"],
    number_format: NumberFormat,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "rows inputs"]:
    """Returns each weight rounded to the nearest representable multiple of its scale.

    The gradient passes straight through. Learned scales get a gradient too, and clipped weights then get none.

    Args:
        weight: Weight of a layer.
        scales: Scales of equally sized groups of inputs.
        number_format: Values that a weight can take, in units of its scale.
        dtype: Of the result; the weight's own by default.

    Source: straight-through estimator: Bengio et al. 2013 (arXiv 1308.3432); gradient of learned scales: LSQ, Esser et
    al. 2020 (arXiv 1902.08153), equations 3 and 4, without its factor on the scale's gradient: Adam cancels it.
    """
    function = _FakeQuantizeWeightLearned if scales.requires_grad else _FakeQuantizeWeight
    rounded: Tensor = function.apply(weight, scales, number_format, dtype or weight.dtype)
    return rounded


def fake_quantize_tensor(
    x: Tensor, scale: Float[Tensor, ""], zero_point: Float[Tensor, ""], dtype: torch.dtype | None = None
) -> Tensor:
    """Returns activations rounded to an unsigned 8-bit grid with one scale and zero point.

    The gradient passes where activations aren't clipped, and reaches a learned scale.

    Args:
        x: Activations of any shape.
        scale: Step of the grid.
        zero_point: Level that represents 0; fixed.
        dtype: Of the result; that of `x` by default.

    Source: gradient of the scale: LSQ, Esser et al. 2020 (arXiv 1902.08153), equations 3 and 4; with a zero point other
    than 0: LSQ+, Bhalgat et al. 2020 (arXiv 2004.09576), with the zero point fixed.
    """
    dtype = dtype or x.dtype
    rounded: Tensor
    if x.device.type == "cpu" and not scale.requires_grad:
        rounded = _FakeQuantizeTensorFixed.apply(x, float(scale), float(zero_point), dtype)
    else:
        rounded = _FakeQuantizeTensor.apply(x, scale, zero_point, dtype)
    return rounded


def fake_quantize_tokens(x: Float[Tensor, "*rows inputs"], dtype: torch.dtype | None = None) -> Tensor:
    """Returns activations rounded to 8 bits, each row to its own grid; the gradient passes through.

    The numbers are those of torchao's int8 activations, asymmetric per token, from which ExecuTorch's are derived.

    Args:
        x: Activations [*rows, inputs].
        dtype: Of the result; that of `x` by default.
    """
    rounded: Tensor = _FakeQuantizeRows.apply(x, _round_tokens, dtype or x.dtype)
    return rounded


def fake_quantize_groups(x: Float[Tensor, "*rows inputs"], dtype: torch.dtype | None = None) -> Tensor:
    """Returns activations rounded to 8 bits, each group of a row to its own grid; the gradient passes through.

    The numbers are those of ONNX Runtime's MatMulNBits at accuracy level 4, symmetric with 127 steps to each side.

    Args:
        x: Activations [*rows, inputs], in groups of `find_input_group(inputs)`.
        dtype: Of the result; that of `x` by default.
    """
    rounded: Tensor = _FakeQuantizeRows.apply(x, _round_groups, dtype or x.dtype)
    return rounded


def fake_quantize_float8(x: Float[Tensor, "*rows inputs"], dtype: torch.dtype | None = None) -> Tensor:
    """Returns activations as 8-bit floats times a scale per row; the gradient passes through.

    The numbers are those of torchao's float8 activations with per-row scales, and of compressed-tensors' with per-token
    scales.

    Args:
        x: Activations [*rows, inputs].
        dtype: Of the result; that of `x` by default.
    """
    rounded: Tensor = _FakeQuantizeRows.apply(x, _round_float8_rows, dtype or x.dtype)
    return rounded


class _Context(Protocol):
    """The context of an autograd function, as far as it is used here."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    clip_bound: float
    clip_range: tuple[float, float]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _FakeQuantizeWeightLearned(torch.autograd.Function):
    """Rounding of weights with learned scales."""

    @staticmethod
    def forward(
        ctx: _Context, weight: Tensor, scales: Tensor, number_format: NumberFormat, dtype: torch.dtype
    ) -> Tensor:
        group_scales = scales.reshape(-1, 1)
        steps = weight.reshape(len(group_scales), -1) / group_scales
        rounded = round_to_nearest_(steps.clone(), number_format)
        ctx.save_for_backward(steps, rounded)
        ctx.clip_bound = number_format.clip_bound
        return (rounded * group_scales).view(weight.shape).to(dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        steps, rounded = ctx.saved_tensors
        groups = gradient.reshape(steps.shape).to(steps.dtype)
        inside = steps.abs() <= ctx.clip_bound
        slope = torch.where(inside, rounded - steps, rounded)
        of_weight = (groups * inside).view(gradient.shape).to(gradient.dtype)
        return of_weight, (groups * slope).sum(1).view(gradient.shape[0], -1), None, None


class _FakeQuantizeWeight(torch.autograd.Function):
    """Rounding of weights with fixed scales, in place if possible.

    On a CPU this takes a third of the time of torch's fake quantization.
    """

    @staticmethod
    def forward(
        ctx: _Context, weight: Tensor, scales: Tensor, number_format: NumberFormat, dtype: torch.dtype
    ) -> Tensor:
        group_scales = scales.view(-1, 1)
        rounded = round_to_nearest_(weight.view(len(group_scales), -1) / group_scales, number_format)
        return rounded.mul_(group_scales).view(weight.shape).to(dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


class _FakeQuantizeTensorFixed(torch.autograd.Function):
    """Rounding of activations with a fixed scale given as a Python number: a third of the time on a CPU.

    On other devices, reading the scale would force a synchronization.
    """

    @staticmethod
    def forward(ctx: _Context, x: Tensor, scale: float, zero_point: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clip_range = (-zero_point - 0.5) * scale, (LARGEST_LEVEL - zero_point + 0.5) * scale
        steps = x / scale if x.dtype == torch.float32 else x.float().div_(scale)
        return steps.round_().clamp_(-zero_point, LARGEST_LEVEL - zero_point).mul_(scale).to(dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradient.to(x.dtype), x, *ctx.clip_range), None, None, None


class _FakeQuantizeTensor(torch.autograd.Function):
    """Rounding of activations with a scale on any device, which may be learned."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, scale: Tensor, zero_point: Tensor, dtype: torch.dtype) -> Tensor:
        steps = x.float() / scale
        learned = ctx.needs_input_grad[1]
        levels = (steps.round() if learned else steps.round_()).add_(zero_point)
        clipped = levels.clamp(0, LARGEST_LEVEL).sub_(zero_point)
        ctx.save_for_backward(levels.to(dtype), *((steps, clipped) if learned else ()))
        return (clipped * scale if learned else clipped.mul_(scale)).to(dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        levels, *rest = ctx.saved_tensors
        of_x = _zero_clipped(gradient, levels)
        if not rest:
            return of_x, None, None, None
        steps, clipped = rest
        slope = clipped - _zero_clipped(steps, levels.float())
        return of_x, (gradient * slope).sum() / (gradient.numel() * (LARGEST_LEVEL // 2)) ** 0.5, None, None


class _FakeQuantizeRows(torch.autograd.Function):
    """Rounding of activations by the function `round_rows` in float32; the gradient passes through."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, round_rows: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        return round_rows(x.float()).to(dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def _round_tokens(x: Tensor) -> Tensor:
    scale, zero_point = compute_token_grid(x)
    steps = (x * (1 / scale)).round_().add_(zero_point)
    return steps.clamp_(0, LARGEST_LEVEL).sub_(zero_point).mul_(scale)


def _round_groups(x: Tensor) -> Tensor:
    groups, largest = split_inputs(x)
    steps = (groups * (INT8.largest / largest)).round_()
    return steps.mul_(largest / INT8.largest).view(x.shape)


def _round_float8_rows(x: Tensor) -> Tensor:
    scales = compute_float8_scales(x)
    return round_to_nearest_(x / scales, FLOAT8).mul_(scales)


def _zero_clipped(values: Tensor, levels: Tensor) -> Tensor:
    """Returns the values where `levels` are on the grid, 0 elsewhere; on a CPU in a tenth of the time of a mask."""
    inside: Tensor = torch.ops.aten.hardtanh_backward(values, levels, -0.5, LARGEST_LEVEL + 0.5)
    return inside
