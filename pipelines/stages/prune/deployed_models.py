"""Teacher and students as they will be deployed, ready to be timed."""

from pathlib import Path
from typing import TypeAlias

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.targets import by_scheme
from compress.quantize.config import QuantizeConfig
from distill.checkpoint.custom_models import load_model_folder
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.schemes import quantization_by, reduces_range_of_dynamic_int8
from pipelines.stages.deliver.exported_targets import find_budget_target
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.prune.budget_timing import TimedModel, TimingTexts, build_timed

RoundingKey: TypeAlias = str | list[object]  # JSON types


def build_timed_teacher(source: Path, folder: Path, texts: TimingTexts) -> TimedModel:
    """Returns the teacher of a checkpoint, exported into `folder`."""
    target = find_budget_target(texts.budget, teacher=True)
    return build_timed(load_model_folder(source), load_student_tokenizer(source), target, folder, texts)


def build_timed_student(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: DistillConfig, folder: Path, texts: TimingTexts
) -> TimedModel:
    """Returns a student, quantized as it will be deployed and exported into `folder`."""
    quantization, reduce_range = timing_quantization(config), reduces_range_of_dynamic_int8(config)
    target = find_budget_target(config.budget)
    return build_timed(model, tokenizer, target, folder, texts, quantization, reduce_range=reduce_range)


def timing_quantization(config: DistillConfig) -> QuantizeConfig | None:
    """Returns the quantization that students are timed with: the final one for an int8 budget, otherwise None."""
    if not config.quantize.scheme or config.budget.precision != "int8":
        return None
    return quantization_by(config, next(iter(by_scheme([config.budget.runtime], config.quantize.scheme))))


def rounding_key(config: DistillConfig) -> RoundingKey:
    """Returns the quantization settings that latency measurements depend on, for stage keys."""
    quantization = timing_quantization(config)
    if quantization is None:
        return "reduce_range" if reduces_range_of_dynamic_int8(config) else ""
    return [quantization.scheme, quantization.float_layers, quantization.reduce_range]
