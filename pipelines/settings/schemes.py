"""The quantization schemes of a run's students, and whether their weights have 7 or 8 bits."""

from dataclasses import replace
from pathlib import Path

from compress.export.common.targets import by_scheme, parse_formats
from compress.export.processors import resolve_reduce_range
from compress.quantize.config import Processor, QuantizeConfig
from compress.quantize.schemes import SCHEMES, has_integer_products, resolve_scheme
from pipelines.settings.commands.distill import DistillConfig


def list_schemes(config: DistillConfig) -> dict[str, list[str]]:
    """Returns scheme -> the formats that support it, for all students; the first scheme is the main student's."""
    if not config.quantize.scheme:
        return {}
    measured = [config.budget.runtime] if config.budget.precision == "int8" else []
    return by_scheme(dict.fromkeys((*parse_formats(config.export), *measured)), config.quantize.scheme)


def measured_scheme(config: DistillConfig) -> str | None:
    """Returns the scheme of the student that is exported in the budget's runtime and precision, empty if unquantized.

    It is None without a budget, or if no student has that precision there.
    """
    budget, schemes = config.budget, list_schemes(config)
    if not budget.requested:
        return None
    if budget.precision == "fp32" or not schemes:
        return next(iter(schemes), "")
    fitting = (scheme for scheme, formats in schemes.items() if budget.runtime in formats)
    return next((each for each in fitting if resolve_scheme(each).precision == budget.precision), None)


def quantization_by(config: DistillConfig, scheme: str) -> QuantizeConfig:
    """Returns the quantization settings for one scheme, with `reduce_range` resolved.

    The result no longer depends on the processor.

    Raises:
        CompressError: 8-bit weights are requested that can't be verified on this processor.
    """
    how, formats = config.quantize, list_schemes(config)[scheme]
    saturable = has_integer_products(SCHEMES[scheme])
    reduce_range = saturable and resolve_reduce_range(how.reduce_range, how.processor, formats)
    return replace(how, scheme=scheme, reduce_range=reduce_range, processor="here")


def is_dynamic(config: DistillConfig) -> bool:
    """Returns whether students are deployed with ONNX Runtime's dynamic int8, which needs no training."""
    budget = config.budget
    return budget.requested and (budget.runtime, budget.precision, config.quantize.scheme) == (
        "onnxruntime",
        "int8",
        "",
    )


def reduces_range_of_dynamic_int8(config: DistillConfig) -> bool:
    """Returns whether ONNX Runtime's dynamic int8 uses 7-bit weights.

    Raises:
        CompressError: 8-bit weights are requested that can't be scored on this processor.
    """
    how = config.quantize
    return is_dynamic(config) and resolve_reduce_range(how.reduce_range, how.processor, ["onnxruntime"])


def check_processor(config: DistillConfig) -> None:
    """Checks that the exported files can be verified on this processor.

    Raises:
        CompressError: Files with 8-bit weights can't be verified on this processor.
    """
    reduces_range_of_dynamic_int8(config)
    for scheme in list_schemes(config):
        quantization_by(config, scheme)


def describe_reduced_range(config: DistillConfig) -> bool | dict[str, bool]:
    """Returns whether weights have 7 bits; scheme -> bool if the schemes differ."""
    if not config.quantize.scheme:
        return reduces_range_of_dynamic_int8(config)
    reduced = {scheme: quantization_by(config, scheme).reduce_range is True for scheme in list_schemes(config)}
    return next(iter(reduced.values())) if len(set(reduced.values())) == 1 else reduced


def needs_reduced_range(processor: Processor, folder: Path, *, dynamic: bool) -> bool:
    """Returns whether ONNX Runtime's dynamic int8 version of the checkpoint has 7-bit weights.

    Raises:
        CompressError: 8-bit weights are requested that can't be scored on this processor.
    """
    from compress.quantize.store import is_quantized

    wanted = dynamic and not is_quantized(folder)
    return wanted and resolve_reduce_range("auto", processor, ["onnxruntime"], group="")
