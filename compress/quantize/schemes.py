"""Quantization schemes by name: which tensors are quantized, and to how many bits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from compress.errors import CompressError

LARGEST_LEVEL = 255  # largest level of an 8-bit activation; the smallest is 0
SMALLEST_SCALE = 1e-9  # lower bound of a scale: a row of zeros stays zeros
LARGEST_GROUP, SMALLEST_GROUP = 128, 16  # inputs that share a scale where inputs are quantized by groups


@dataclass(frozen=True)
class NumberFormat:
    """Values that a quantized weight can take, in units of its scale.

    Args:
        largest: Largest value; the smallest is its negative.
        is_float8: Whether they are 8-bit floats (E4M3), whose spacing grows with magnitude, instead of integers.
    """

    largest: int
    is_float8: bool = False

    @property
    def clip_bound(self) -> float:
        """The magnitude from which values are clipped: half a step beyond the largest value."""
        return self.largest + (16 if self.is_float8 else 0.5)


INT8 = NumberFormat(127)
FLOAT8 = NumberFormat(448, is_float8=True)


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantized.

    Weights are symmetric, with a scale per output or per `group` of adjacent inputs. Embedding tables always have 8-bit
    integers and a scale per row.

    Args:
        name: Name in the settings.
        bits: Bits of a weight; 7 is 8 bits with the largest values unused, see `reduce_weight_range`.
        group: Inputs that share a scale; 0: all inputs of an output.
        input_scales: How the inputs of a linear layer are quantized: `float`, not at all; `token`, 8 bits with a scale
            and zero point per token, computed in each call; `tensor`, 8 bits with one scale and zero point from
            calibration or training; `group`, 8 bits with a scale per token and group of adjacent inputs, computed in
            each call.
        is_float8: 8-bit floats (E4M3) instead of integers, for weights and for inputs with per-token scales, which then
            have no zero point.
    """

    name: str
    bits: int = 8
    group: int = 0
    input_scales: Literal["float", "token", "tensor", "group"] = "float"
    is_float8: bool = False

    @property
    def number_format(self) -> NumberFormat:
        """Values that a weight can take, in units of its scale."""
        return FLOAT8 if self.is_float8 else NumberFormat(2 ** (self.bits - 1) - 1)

    def find_group(self, inputs: int) -> int:
        """Returns the number of adjacent inputs whose weights share a scale in a layer with so many; 0: all of them.

        Schemes that quantize inputs by groups have smaller groups in layers that theirs don't divide.
        """
        return find_input_group(inputs) if self.group and self.input_scales == "group" else self.group

    @property
    def input_divisor(self) -> int:
        """The number that has to divide the inputs of a layer."""
        return SMALLEST_GROUP if self.input_scales == "group" else self.group or 1

    @property
    def stored_bits(self) -> int:
        """Bits per weight in a file."""
        return 4 if self.bits == 4 else 8

    @property
    def precision(self) -> str:
        """Name of the precision in reports and files: int8, int4 or fp8."""
        return "fp8" if self.is_float8 else f"int{self.stored_bits}"


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8-static", input_scales="tensor"),
        Scheme("int8-dynamic", input_scales="token"),
        Scheme("int8-weights"),
        Scheme("int4-weights", bits=4, group=32),
        Scheme("int4-dynamic", bits=4, group=32, input_scales="token"),
        Scheme("int8-groups", group=LARGEST_GROUP, input_scales="group"),
        Scheme("int4-groups", bits=4, group=LARGEST_GROUP, input_scales="group"),
        Scheme("fp8-weights", is_float8=True),
        Scheme("fp8-dynamic", input_scales="token", is_float8=True),
    )
}

PREFERRED_SCHEMES: Mapping[str, tuple[str, ...]] = {  # precision -> each format uses the first scheme that it supports
    "int8": ("int8-static", "int8-dynamic"),
    "int4": ("int4-weights", "int4-dynamic"),
    "fp8": ("fp8-dynamic",),
}


def find_input_group(inputs: int) -> int:
    """Returns the largest power of two up to LARGEST_GROUP that divides a number of inputs.

    Raises:
        CompressError: It is smaller than SMALLEST_GROUP, the smallest that ONNX Runtime has a product for.
    """
    group = math.gcd(inputs, LARGEST_GROUP)
    if group < SMALLEST_GROUP:
        raise CompressError(
            f"quantize: expected a number of inputs divisible by {SMALLEST_GROUP}, found {inputs}: ONNX Runtime has no "
            "products of smaller groups"
        )
    return group


def resolve_schemes(name: str) -> tuple[str, ...]:
    """Returns the names of the schemes that a scheme or precision stands for, in order of preference.

    Raises:
        CompressError: The name is unknown.
    """
    if name not in PREFERRED_SCHEMES and name not in SCHEMES:
        raise CompressError(
            f"quantize.scheme: expected one of {', '.join((*SCHEMES, *PREFERRED_SCHEMES))}, found {name!r}"
        )
    return PREFERRED_SCHEMES.get(name, (name,))


def resolve_scheme(name: str) -> Scheme:
    """Returns the scheme of a name, or the preferred one of a precision.

    Raises:
        CompressError: The name is unknown.
    """
    return SCHEMES[resolve_schemes(name)[0]]


def has_integer_products(scheme: Scheme) -> bool:
    """Returns whether a model in this scheme may multiply 8-bit weights by 8-bit inputs.

    4-bit schemes with quantized inputs use 8-bit weights in sensitive layers and tied heads.
    """
    return scheme.input_scales != "float" and not scheme.is_float8


def reduce_weight_range(scheme: Scheme) -> Scheme:
    """Returns the scheme with weights from -63 to 63 instead of -127 to 127 if its integer products have 8-bit weights.

    x86 processors without VNNI add pairs of 8-bit products in 16 bits. Twice 255 x 127 overflows and saturates; twice
    255 x 63 fits.
    """
    return replace(scheme, bits=7) if scheme.bits == 8 and has_integer_products(scheme) else scheme


def widen_scheme(scheme: Scheme, *, reduce_range: bool = False) -> Scheme | None:
    """Returns the scheme with more bits, for sensitive layers, or None if they stay in float.

    With `reduce_range` the wider scheme's weights are limited by `reduce_weight_range`.
    """
    wider = SCHEMES.get(scheme.name.replace("int4", "int8")) if scheme.bits == 4 else None
    return reduce_weight_range(wider) if wider is not None and reduce_range else wider
