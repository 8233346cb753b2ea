"""Quantization grids of integers or 8-bit floats: scales, zero points and rounding, as pure functions of tensors.

Every deployed format repeats exactly these operations, in this order and in float32: multiplying by a reciprocal
instead of dividing, or rounding ties differently, would occasionally move a value by a whole step.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.errors import CompressError
from compress.quantize.schemes import FLOAT8, LARGEST_LEVEL, SMALLEST_SCALE, NumberFormat, find_input_group

MANTISSA_BITS, LEAST_EXPONENT = 3, -6  # of E4M3; below the least exponent the spacing is constant
EXPONENT_MASK = 0x7F800000  # exponent bits of a float32


def round_to_nearest_(steps: Tensor, number_format: NumberFormat) -> Tensor:
    """Rounds values in units of their scale to the nearest representable ones, in place; ties go to even."""
    if number_format.is_float8:
        spacing = compute_float8_spacing(steps.clamp_(-number_format.largest, number_format.largest))
        return steps.div_(spacing).round_().mul_(spacing)
    return steps.round_().clamp_(-number_format.largest, number_format.largest)


def compute_float8_spacing(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the spacing of 8-bit floats (E4M3) around float32 values: a fraction of the power of two below each.

    On a CPU a cast to E4M3 and back takes six times as long as rounding with this spacing.
    """
    power = (x.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    return power.mul_(2.0**-MANTISSA_BITS).clamp_(min=2.0 ** (LEAST_EXPONENT - MANTISSA_BITS))


def split_groups(weight: Float[Tensor, "rows inputs"], group: int) -> Float[Tensor, "rows groups size"]:
    """Returns a view of the weight in groups of `group` adjacent inputs; 0: one group per row.

    Raises:
        CompressError: `group` doesn't divide the number of inputs.
    """
    rows, inputs = weight.shape
    if group and inputs % group:
        raise CompressError(
            f"quantize: expected a number of inputs divisible by the group size {group}, found {inputs}: the last "
            "group of a row would include weights of the next row"
        )
    return weight.view(rows, -1, group or inputs)


def compute_weight_scales(
    weight: Float[Tensor, "rows inputs"], number_format: NumberFormat, group: int = 0
) -> Float[Tensor, "rows groups"]:
    """Returns the largest magnitude of each row, or of each group of inputs, divided by the largest number.

    Group scales are rounded to bfloat16, the type that XNNPACK's 4-bit kernels use.

    Raises:
        CompressError: `group` doesn't divide the number of inputs.
    """
    largest = split_groups(weight, group).abs().amax(-1)
    scales = largest.div_(number_format.largest).clamp_(min=SMALLEST_SCALE)
    return scales.bfloat16().float() if group else scales


def quantize_weight(
    weight: Float[Tensor, "rows inputs"], scales: Float[Tensor, "rows groups"], number_format: NumberFormat
) -> Tensor:
    """Returns the weight in units of its scales [rows, inputs], rounded, as int8 or float8_e4m3fn."""
    groups = weight.detach().view(scales.numel(), -1)
    dtype = torch.float8_e4m3fn if number_format.is_float8 else torch.int8
    return round_to_nearest_(groups / scales.view(-1, 1), number_format).to(dtype).view(weight.shape)


def compute_tensor_grid(low: Float[Tensor, "*shape"], high: Float[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """Returns (scale, zero point) of the unsigned 8-bit grid from `low` to `high`.

    The range always includes 0, so that zeros from GELU and the mask stay exact.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / LARGEST_LEVEL).clamp(min=SMALLEST_SCALE)
    return scale, (-low / scale).round().clamp(0, LARGEST_LEVEL)


def compute_token_grid(x: Float[Tensor, "*rows inputs"]) -> tuple[Tensor, Tensor]:
    """Returns (scale, zero point) of the unsigned 8-bit grid of each row, both [*rows, 1]."""
    return compute_tensor_grid(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))  # aminmax takes ten times as long


def split_inputs(
    x: Float[Tensor, "*rows inputs"],
) -> tuple[Float[Tensor, "*rows groups size"], Float[Tensor, "*rows groups 1"]]:
    """Returns activations in the groups that are rounded together, and the largest magnitude of each."""
    groups = x.unflatten(-1, (-1, find_input_group(x.shape[-1])))
    return groups, groups.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST_SCALE)


def compute_float8_scales(x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows 1"]:
    """Returns the scale of each row for 8-bit floats: its largest magnitude divided by 448."""
    return (x.abs().amax(-1, keepdim=True) / FLOAT8.largest).clamp_(min=SMALLEST_SCALE)


def is_near_tie(x: Tensor, scale: Tensor, tolerance: float) -> Bool[Tensor, "..."]:
    """Returns a mask of activations within `tolerance` steps of a rounding tie, where rounding may go either way."""
    steps = x / scale
    return (steps - steps.floor() - 0.5).abs() < tolerance


def is_near_float8_tie(x: Float[Tensor, "*rows inputs"], tolerance: float) -> Bool[Tensor, "*rows inputs"]:
    """Returns a mask of values within `tolerance` steps of the midpoint of two 8-bit floats."""
    steps = x.float() / compute_float8_scales(x.float())
    return is_near_tie(steps, compute_float8_spacing(steps), tolerance)
