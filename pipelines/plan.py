"""What a run would take, told from headers and counts alone."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig

from distill.module import sizes_of
from distill.student.build import student_config
from distill.student.spec import is_relative
from distill.tasks.choose import TASKS
from distill.teacher.cache import Dense
from distill.teacher.cache.preflight import ROW_BYTES, SIGNAL_BYTES
from distill.teacher.load import checkpoint_folder
from pipelines.cache_stage import kept_for
from pipelines.cache_task import make_signal
from pipelines.config import DistillConfig


def planned_sizes(config: DistillConfig, source: Path, task: str) -> list[tuple[str, str]]:
    """Rows, parameters and bytes of what the run would read and write."""
    kind = TASKS[task]
    splits = kind.read(config.data, config.seed)
    teacher = AutoConfig.from_pretrained(source)
    teacher.num_labels = len(splits.labels)
    if is_relative(config.student.spec):
        student = student_config(teacher, config.student.spec)
    else:
        student = AutoConfig.from_pretrained(checkpoint_folder(config.student.spec, "student"))
        student.num_labels = len(splits.labels)
    big, small = parameters(teacher), parameters(student)
    rows = len(splits.train) + len(splits.unlabelled)
    general = config.general
    prose = f"{general.blocks:,} blocks" if general.blocks else "all"
    steps = config.train.epochs * -(-rows // (config.train.batch_size * config.train.accumulate))
    return [
        ("train / validation / test", f"{len(splits.train)} / {len(splits.validation)} / {len(splits.test)} texts"),
        ("unlabelled", f"{len(splits.unlabelled)} texts"),
        *([("plain text", f"{prose} of {general.data}, {general.train.epochs} epochs")] if general.data else []),
        ("task", f"{task}, {len(splits.labels)} label{'s' * (len(splits.labels) > 1)}"),
        ("teacher", f"{big / 1e6:.1f}M parameters, {4 * big / 1e6:.0f} MB"),
        ("student", f"{small / 1e6:.1f}M parameters, {4 * small / 1e6:.0f} MB"),
        ("cache", f"at most {rows * cached_bytes(config, teacher, student, kind.name) / 1e6:.1f} MB"),
        ("student training", f"{config.train.epochs} epochs, {steps} steps"),
    ]


def cached_bytes(config: DistillConfig, teacher: PretrainedConfig, student: PretrainedConfig, task: str) -> float:
    """Most that a text takes in the cache."""
    keep = kept_for(config.loss, sizes_of(teacher), sizes_of(student))
    signals = [make_signal(name, task, keep, teacher, 0) for name in keep.signals.split(",")]
    once = [isinstance(s, Dense) and s.each == "sample" for s in signals]
    each = sum(s.nominal_bytes() * (1 if o else config.data.max_length) for s, o in zip(signals, once, strict=True))
    return each + ROW_BYTES + len(signals) * SIGNAL_BYTES


def parameters(config: PretrainedConfig) -> int:
    """Parameters of a classifier of this config, counted without memory for them."""
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config).num_parameters()
