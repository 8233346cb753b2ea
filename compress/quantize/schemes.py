"""Quantization schemes by name: which tensors are rounded, and to how many bits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from compress.errors import CompressError


@dataclass(frozen=True)
class Numbers:
    """Values that a weight can take, in units of its scale.

    Args:
        largest: Largest value; the smallest is its negative.
        floats: Whether they are 8-bit floats (E4M3), whose steps grow with magnitude, instead of integers.
    """

    largest: int
    floats: bool = False

    @property
    def edge(self) -> float:
        """Clipping bound: half a step beyond the largest value."""
        return self.largest + (16 if self.floats else 0.5)


INT8 = Numbers(127)
FLOAT8 = Numbers(448, floats=True)


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantized.

    Weights are symmetric, with a scale for each output or for each `group` of adjacent inputs; embedding tables always
    have 8-bit integers and per-row scales.

    Args:
        name: Name in the settings.
        bits: Bits of a weight; 7 is 8 bits with the largest values unused, see `reduced_scheme`.
        group: Inputs that share a scale; 0: all inputs of an output.
        inputs: Of a linear layer: `float`, unrounded; `token`, 8 bits with a scale and zero point per token, computed
            in each call; `tensor`, 8 bits with one scale and zero point from calibration or training.
        floats: 8-bit floats (E4M3) instead of integers, for weights and for inputs with per-token scales, which then
            have no zero point.
    """

    name: str
    bits: int = 8
    group: int = 0
    inputs: Literal["float", "token", "tensor"] = "float"
    floats: bool = False

    @property
    def numbers(self) -> Numbers:
        """Values that a weight can take, in units of its scale."""
        return FLOAT8 if self.floats else Numbers(2 ** (self.bits - 1) - 1)

    @property
    def stored(self) -> int:
        """Bits per weight in a file."""
        return 4 if self.bits == 4 else 8

    @property
    def precision(self) -> str:
        """Name of the precision in reports and files."""
        return "fp8" if self.floats else f"int{self.stored}"


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8-static", inputs="tensor"),
        Scheme("int8-dynamic", inputs="token"),
        Scheme("int8-weights"),
        Scheme("int4-weights", bits=4, group=32),
        Scheme("int4-dynamic", bits=4, group=32, inputs="token"),
        Scheme("fp8-weights", floats=True),
        Scheme("fp8-dynamic", inputs="token", floats=True),
    )
}


def reduced_scheme(scheme: Scheme) -> Scheme:
    """Returns the scheme with weights from -63 to 63 instead of -127 to 127, if it has byte products.

    x86 processors without VNNI add pairs of byte products in 16 bits. Twice 255 x 127 overflows and saturates; twice
    255 x 63 fits.
    """
    return replace(scheme, bits=7) if scheme.bits == 8 and multiplies_bytes(scheme) else scheme


def multiplies_bytes(scheme: Scheme) -> bool:
    """Returns whether integer products may have 8-bit weights.

    4-bit schemes with rounded inputs use 8 bits in sensitive layers and tied heads.
    """
    return scheme.inputs != "float" and not scheme.floats


def wider_scheme(scheme: Scheme, *, in_7_bits: bool = False) -> Scheme | None:
    """Returns the scheme with more bits, for sensitive layers, or None if they stay in float.

    With `in_7_bits` the wider scheme is `reduced_scheme`.
    """
    found = SCHEMES.get(scheme.name.replace("int4", "int8")) if scheme.bits == 4 else None
    return reduced_scheme(found) if found is not None and in_7_bits else found


BITS: Mapping[str, tuple[str, ...]] = {  # requested by bits alone: each format uses the first that it supports
    "int8": ("int8-static", "int8-dynamic"),
    "int4": ("int4-weights", "int4-dynamic"),
    "fp8": ("fp8-dynamic",),
}


def schemes_named(name: str) -> tuple[str, ...]:
    """Returns the schemes that a name stands for, in order of preference.

    Raises:
        CompressError: The name is unknown.
    """
    if name not in BITS and name not in SCHEMES:
        raise CompressError(f"quantize.scheme: expected one of {', '.join((*SCHEMES, *BITS))}, found {name!r}")
    return BITS.get(name, (name,))


def scheme_of(name: str) -> Scheme:
    """Returns the scheme of a name, the preferred one if there are several.

    Raises:
        CompressError: The name is unknown.
    """
    return SCHEMES[schemes_named(name)[0]]
