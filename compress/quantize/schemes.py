"""What is rounded to how many bits: the schemes by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from compress.errors import CompressError


@dataclass(frozen=True)
class Numbers:
    """What a weight may be in steps of its scale.

    Args:
        largest: Of them; the smallest is minus it.
        floats: They are 8-bit floats (E4M3), whose steps grow with them, not integers.
    """

    largest: int
    floats: bool = False

    @property
    def edge(self) -> float:
        """What is beyond it is cut off: half a step after the largest."""
        return self.largest + (16 if self.floats else 0.5)


INT8 = Numbers(127)
FLOAT8 = Numbers(448, floats=True)


@dataclass(frozen=True)
class Scheme:
    """How a layer is rounded.

    Weights are symmetric numbers with a scale for each output, or for each `group` of neighbours along the inputs;
    word tables have a scale a row and are always integers of 8 bits.

    Args:
        name: As it is asked for.
        bits: Of a weight; 7 is 8 bits of which the largest aren't used, see `reduced`.
        group: Inputs that share a scale; 0: all of an output's.
        inputs: Of a linear layer: `float`, left as they are; `token`, 8 bits with a scale and zero point that each
            token gets when the layer is called; `tensor`, 8 bits with one of both that calibration or training found.
        floats: 8-bit floats (E4M3) in the place of integers, of weights and of inputs with a scale a token, which then
            have no zero point.
    """

    name: str
    bits: int = 8
    group: int = 0
    inputs: Literal["float", "token", "tensor"] = "float"
    floats: bool = False

    @property
    def numbers(self) -> Numbers:
        """That a weight may be in steps of its scale."""
        return FLOAT8 if self.floats else Numbers(2 ** (self.bits - 1) - 1)

    @property
    def stored(self) -> int:
        """Bits that a weight takes in a file."""
        return 4 if self.bits == 4 else 8

    @property
    def precision(self) -> str:
        """As reports and files name it."""
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


def reduced(scheme: Scheme) -> Scheme:
    """The scheme with weights from -63 to 63 in the place of 127.

    x86 processors without VNNI add pairs of products of bytes in 16 bits. 255 x 127 twice doesn't fit there and is cut
    off; 255 x 63 twice does.
    """
    return replace(scheme, bits=7) if scheme.bits == 8 and multiplies_bytes(scheme) else scheme


def multiplies_bytes(scheme: Scheme) -> bool:
    """Whether products of integers may have weights of 8 bits: with 4, those of sensitive layers and tied heads do."""
    return scheme.inputs != "float" and not scheme.floats


def wider(scheme: Scheme, *, in_7_bits: bool = False) -> Scheme | None:
    """The scheme with more bits, for layers that don't bear it; None: they stay in float.

    With `in_7_bits` it is `reduced`.
    """
    found = SCHEMES.get(scheme.name.replace("int4", "int8")) if scheme.bits == 4 else None
    return reduced(found) if found is not None and in_7_bits else found


BITS: Mapping[str, tuple[str, ...]] = {  # asked for by bits alone: each format takes the first that it holds
    "int8": ("int8-static", "int8-dynamic"),
    "int4": ("int4-weights", "int4-dynamic"),
    "fp8": ("fp8-dynamic",),
}


def schemes_named(name: str) -> tuple[str, ...]:
    """The schemes that a name stands for, those to prefer first.

    Raises:
        CompressError: A name that isn't known.
    """
    if name not in BITS and name not in SCHEMES:
        raise CompressError(f"quantize.scheme: expected one of {', '.join((*SCHEMES, *BITS))}, found {name!r}")
    return BITS.get(name, (name,))


def scheme_of(name: str) -> Scheme:
    """The scheme of a name, of several the first.

    Raises:
        CompressError: A name that isn't known.
    """
    return SCHEMES[schemes_named(name)[0]]
