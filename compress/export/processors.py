"""Processors with saturating byte products, and the choice of 7-bit weights for them.

ONNX Runtime and OpenVINO multiply unsigned bytes by signed bytes. x86 processors without VNNI add pairs of such
products in 16 bits (VPMADDUBSW): twice 255 x 127 overflows and saturates, twice 255 x 63 fits. ARM adds in 32 bits.
"""

from collections.abc import Iterable

from compress.errors import CompressError
from compress.export.common.targets import FORMATS
from compress.export.onnx.int8 import products_saturate
from compress.quantize.config import Processor, ReduceRange

WITHOUT_VNNI = ("avx2", "avx512")


def resolve_reduce_range(
    reduce_range: ReduceRange, processor: Processor, formats: Iterable[str], *, group: str = "quantize."
) -> bool:
    """Returns whether weights whose inputs have 8 bits get 7 bits, in files of these formats.

    Args:
        reduce_range: As requested; auto selects 7 bits if the processor needs them.
        processor: Processor the files will run on.
        formats: Formats of the files.
        group: Prefix of the settings' names, for the message.

    Raises:
        CompressError: Files with 8-bit weights are requested, but products saturate here, so that they can't be
            verified.
    """
    saturating = [name for name in formats if FORMATS[name].saturates]
    if reduce_range is True or not saturating:
        return reduce_range is True
    if reduce_range == "auto" and processor in WITHOUT_VNNI:
        return True
    if not products_saturate():
        return False
    if reduce_range == "auto" and processor == "here":
        return True
    setting, instead = (
        (f"{group}processor {processor}", f"--{group}processor avx2")
        if reduce_range == "auto"
        else (f"{group}reduce_range false", f"--{group}reduce_range true")
    )
    raise CompressError(
        f"{setting}: expected a processor with VNNI, or an ARM one, to verify 8-bit weights of "
        f"{', '.join(saturating)}, found one whose byte products saturate in 16 bits: the file would differ from the "
        f"model and be rejected after the training; {instead} uses 7-bit weights, which are right on every processor"
    )
