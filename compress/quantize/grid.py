"""Quantization grids of integers or 8-bit floats: scales, rounding and its gradients, as pure functions of tensors.

Every deployed format repeats exactly these operations, in this order and in float32: multiplying by a reciprocal
instead of dividing, or rounding ties differently, would occasionally move a value by a whole step.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from compress.errors import CompressError
from compress.quantize.schemes import FLOAT8, Numbers

LEVELS = 255  # largest 8-bit activation; the smallest is 0
SMALLEST = 1e-9  # lower bound of a scale: a row of zeros stays zeros
FRACTION, LEAST_EXPONENT = 3, -6  # of E4M3: mantissa bits, and the exponent below which the step size is constant
EXPONENT = 0x7F800000  # exponent bits of a float32


def nearest_(steps: Tensor, numbers: Numbers) -> Tensor:
    """Rounds to the nearest representable number, in place; ties go to even."""
    if numbers.floats:
        apart = float_step(steps.clamp_(-numbers.largest, numbers.largest))
        return steps.div_(apart).round_().mul_(apart)
    return steps.round_().clamp_(-numbers.largest, numbers.largest)


def float_step(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the spacing of 8-bit floats (E4M3) around float32 values: a fraction of the power of two below each.

    On a CPU a cast to E4M3 and back takes six times as long as rounding with these steps.
    """
    power = (x.view(torch.int32) & EXPONENT).view(torch.float32)
    return power.mul_(2.0**-FRACTION).clamp_(min=2.0 ** (LEAST_EXPONENT - FRACTION))


def weight_scales(
    weight: Float[Tensor, "rows inputs"], numbers: Numbers, group: int = 0
) -> Float[Tensor, "rows groups"]:
    """Returns the largest magnitude of each row, or of each group of `group` inputs, over the largest number.

    Group scales are rounded to bfloat16, the type that XNNPACK's 4-bit kernels use.

    Raises:
        CompressError: `group` doesn't divide the number of inputs.
    """
    scales = grouped(weight, group).abs().amax(-1).div_(numbers.largest).clamp_(min=SMALLEST)
    return scales.bfloat16().float() if group else scales


def grouped(weight: Float[Tensor, "rows inputs"], group: int) -> Float[Tensor, "rows groups size"]:
    rows, inputs = weight.shape
    if group and inputs % group:
        raise CompressError(
            f"quantize: expected a number of inputs that groups of {group} divide, found {inputs}: the last group of a "
            "row would reach into the next row"
        )
    return weight.view(rows, -1, group or inputs)


def fake_quantize_weight(
    weight: Float[Tensor, "rows inputs"],
    scales: Float[Tensor, "rows groups"],
    numbers: Numbers,
    kind: torch.dtype | None = None,
) -> Float[Tensor, "rows inputs"]:
    """Returns each weight rounded to the nearest representable multiple of its scale.

    The gradient passes straight through. Rounding is computed in float32; the result has the dtype `kind`, or the
    weight's own. Learned scales get a gradient too, and clipped weights then get none.

    Source: straight-through estimator, Bengio et al. 2013 (arXiv 1308.3432); of learned scales LSQ, Esser et al. 2020
    (arXiv 1902.08153), equations 3 and 4. Its factor on the scale's gradient is left out: Adam cancels it.
    """
    function = FakeQuantizeWeightLearned if scales.requires_grad else FakeQuantizeWeight
    return function.apply(weight, scales, numbers, kind or weight.dtype)


class FakeQuantizeWeightLearned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scales: Tensor, numbers: Numbers, kind: torch.dtype) -> Tensor:
        each = scales.reshape(-1, 1)
        steps = weight.reshape(len(each), -1) / each
        whole = nearest_(steps.clone(), numbers)
        ctx.save_for_backward(steps, whole)
        ctx.edge = numbers.edge
        return (whole * each).view(weight.shape).to(kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        steps, whole = ctx.saved_tensors
        rows = gradient.reshape(steps.shape).to(steps.dtype)
        within = steps.abs() <= ctx.edge
        slope = torch.where(within, whole - steps, whole)
        shape = gradient.shape[0], -1
        return (rows * within).view(gradient.shape).to(gradient.dtype), (rows * slope).sum(1).view(shape), None, None


class FakeQuantizeWeight(torch.autograd.Function):
    """Rounding with fixed scales, in place if possible: on a CPU a third of the time of torch's fake quantization."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scales: Tensor, numbers: Numbers, kind: torch.dtype) -> Tensor:
        each = scales.view(-1, 1)
        rounded = nearest_(weight.view(len(each), -1) / each, numbers).mul_(each)
        return rounded.view(weight.shape).to(kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


def quantize_weight(
    weight: Float[Tensor, "rows inputs"], scales: Float[Tensor, "rows groups"], numbers: Numbers
) -> Tensor:
    """Returns the numbers of a weight that is `fake_quantize_weight` [rows, inputs], as int8 or float8_e4m3fn."""
    rows = weight.detach().view(scales.numel(), -1)
    kind = torch.float8_e4m3fn if numbers.floats else torch.int8
    return nearest_(rows / scales.view(-1, 1), numbers).to(kind).view(weight.shape)


def tensor_grid(low: Float[Tensor, "*shape"], high: Float[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """Returns (scale, zero point) of unsigned 8 bits from `low` to `high`.

    The range always includes 0, so that zeros from GELU and the mask stay exact.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / LEVELS).clamp(min=SMALLEST)
    return scale, (-low / scale).round().clamp(0, LEVELS)


def fake_quantize(
    x: Tensor, scale: Float[Tensor, ""], zero: Float[Tensor, ""], kind: torch.dtype | None = None
) -> Tensor:
    """Returns activations rounded to a per-tensor grid, in float32 as when deployed, as `kind` or in their own dtype.

    The gradient passes where activations aren't clipped, and reaches a learned scale.

    Source: gradient of the scale: LSQ, Esser et al. 2020 (arXiv 1902.08153), equations 3 and 4; of a zero point that
    isn't 0: LSQ+, Bhalgat et al. 2020 (arXiv 2004.09576), with the zero point fixed.
    """
    kind = kind or x.dtype
    if x.device.type == "cpu" and not scale.requires_grad:
        return FakeQuantizeInPlace.apply(x, float(scale), float(zero), kind)
    return FakeQuantize.apply(x, scale, zero, kind)


class FakeQuantizeInPlace(torch.autograd.Function):
    """Rounding with a fixed scale given as a Python number: a third of the time on a CPU.

    On other devices, reading the scale would force a synchronisation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, zero: float, kind: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.edges = (-zero - 0.5) * scale, (LEVELS - zero + 0.5) * scale
        steps = x / scale if x.dtype == torch.float32 else x.float().div_(scale)
        return steps.round_().clamp_(-zero, LEVELS - zero).mul_(scale).to(kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradient.to(x.dtype), x, *ctx.edges), None, None, None


class FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, kind: torch.dtype) -> Tensor:
        steps = x.float() / scale
        learned = ctx.needs_input_grad[1]
        whole = (steps.round() if learned else steps.round_()).add_(zero)
        kept = whole.clamp(0, LEVELS).sub_(zero)
        ctx.save_for_backward(whole.to(kind), *((steps, kept) if learned else ()))
        return (kept * scale if learned else kept.mul_(scale)).to(kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        whole, *rest = ctx.saved_tensors
        through = zero_clipped(gradient, whole)
        if not rest:
            return through, None, None, None
        steps, kept = rest
        slope = kept - zero_clipped(steps, whole.float())
        return through, (gradient * slope).sum() / (gradient.numel() * (LEVELS // 2)) ** 0.5, None, None


def zero_clipped(values: Tensor, whole: Tensor) -> Tensor:
    """Returns the values where `whole` is on the grid, 0 elsewhere.

    On a CPU this takes a tenth of the time of a mask.
    """
    return torch.ops.aten.hardtanh_backward(values, whole, -0.5, LEVELS + 0.5)


def near_tie(x: Tensor, scale: Tensor, within: float) -> Tensor:
    """Returns a mask of activations within `within` steps of a rounding tie, where rounding may go either way."""
    steps = x / scale
    return (steps - steps.floor() - 0.5).abs() < within


def fake_quantize_tokens(x: Tensor, kind: torch.dtype | None = None) -> Tensor:
    """Returns activations [..., inputs] rounded to 8 bits, each row to its own `tensor_grid`.

    They are rounded in float32, and returned as `kind` or in their own dtype; the gradient passes through. The numbers
    are those of torchao's int8 activations, asymmetric per token, from which ExecuTorch's are derived.
    """
    return FakeQuantizeRows.apply(x, token_rounded, kind or x.dtype)


class FakeQuantizeRows(torch.autograd.Function):
    """Activations rounded by the function `rounded` in float32; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Callable[[Tensor], Tensor], kind: torch.dtype) -> Tensor:
        return rounded(x.float()).to(kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def token_rounded(x: Tensor) -> Tensor:
    scale, zero = token_grid(x)
    return (x * (1 / scale)).round_().add_(zero).clamp_(0, LEVELS).sub_(zero).mul_(scale)


def token_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (scale, zero point) of each row, both [..., 1]."""
    return tensor_grid(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))  # aminmax takes ten times as long


def fake_quantize_float8(x: Tensor, kind: torch.dtype | None = None) -> Tensor:
    """Returns activations [..., inputs] as 8-bit floats times a per-row scale, the row's largest magnitude over 448.

    They are rounded in float32, and returned as `kind` or in their own dtype; the gradient passes through. The numbers
    are those of torchao's float8 activations with per-row scales, and of compressed-tensors' with per-token scales.
    """
    return FakeQuantizeRows.apply(x, float_rounded, kind or x.dtype)


def float_rounded(x: Tensor) -> Tensor:
    scale = float_scale(x)
    return nearest_(x / scale, FLOAT8).mul_(scale)


def float_scale(x: Tensor) -> Tensor:
    """Returns the scale of each row, [..., 1]."""
    return (x.abs().amax(-1, keepdim=True) / FLOAT8.largest).clamp_(min=SMALLEST)


def near_float_tie(x: Tensor, within: float) -> Tensor:
    """Returns a mask of values of `x` [..., inputs] within `within` steps of the midpoint of two 8-bit floats."""
    steps = x.float() / float_scale(x.float())
    return near_tie(steps, float_step(steps), within)
