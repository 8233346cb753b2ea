"""The schemes that a run's students are quantized by, and how many bits their weights have on its processor."""

from dataclasses import replace
from pathlib import Path

from compress.export.common.targets import by_scheme, formats_of
from compress.export.processors import resolve_reduced
from compress.quantize.config import Processor, QuantizeConfig
from compress.quantize.schemes import SCHEMES, multiplies_bytes
from pipelines.settings.distill_config import DistillConfig


def schemes_of(config: DistillConfig) -> dict[str, list[str]]:
    """Each scheme that students are quantized by -> the formats that take it; the first is the main one's."""
    if not config.quantize.scheme:
        return {}
    measured = [config.budget.runtime] if config.budget.precision == "int8" else []
    return by_scheme(dict.fromkeys((*formats_of(config.export), *measured)), config.quantize.scheme)


def quantization_by(config: DistillConfig, scheme: str) -> QuantizeConfig:
    """The settings of quantization by one scheme, with `reduced` resolved: the processor is no longer needed.

    Raises:
        CompressError: Weights of 8 bits that this processor can't prove.
    """
    how, formats = config.quantize, schemes_of(config)[scheme]
    saturable = multiplies_bytes(SCHEMES[scheme])
    reduced = saturable and resolve_reduced(how.reduced, how.processor, formats)
    return replace(how, scheme=scheme, reduced=reduced, processor="here")


def is_dynamic(config: DistillConfig) -> bool:
    """Whether students are deployed in ONNX Runtime's own int8, which nothing is trained for."""
    budget = config.budget
    return budget.asked and (budget.runtime, budget.precision, config.quantize.scheme) == ("onnxruntime", "int8", "")


def is_dynamic_reduced(config: DistillConfig) -> bool:
    """Whether weights have 7 bits in ONNX Runtime's own int8.

    Raises:
        CompressError: Weights of 8 bits that this processor can't score.
    """
    how = config.quantize
    return is_dynamic(config) and resolve_reduced(how.reduced, how.processor, ["onnxruntime"])


def check_processor(config: DistillConfig) -> None:
    """
    Raises:
        CompressError: Files with weights of 8 bits that this processor can't prove.
    """
    is_dynamic_reduced(config)
    for scheme in schemes_of(config):
        quantization_by(config, scheme)


def resolved_reduced(config: DistillConfig) -> bool | dict[str, bool]:
    """Whether weights have 7 bits; where schemes differ, by scheme."""
    if not config.quantize.scheme:
        return is_dynamic_reduced(config)
    found = {scheme: quantization_by(config, scheme).reduced is True for scheme in schemes_of(config)}
    return next(iter(found.values())) if len(set(found.values())) == 1 else found


def is_reduced(processor: Processor, folder: Path, *, dynamic: bool) -> bool:
    """Whether ONNX Runtime's own int8 of the checkpoint has weights of 7 bits.

    Raises:
        CompressError: Weights of 8 bits that this processor can't score.
    """
    from compress.quantize.store import is_rounded

    wanted = dynamic and not is_rounded(folder)
    return wanted and resolve_reduced("auto", processor, ["onnxruntime"], group="")
