"""Estimates of a run's data sizes, model sizes and steps, from model configurations and row counts alone."""

import copy

from transformers import PretrainedConfig

from distill.cache import Dense
from distill.cache.preflight import ROW_BYTES, SIGNAL_BYTES
from distill.models.layer_sizes import read_layer_sizes
from distill.tasks.choose import TASKS
from distill.tasks.language import Language
from distill.tasks.task import Task
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.layouts import parameters
from pipelines.settings.plan import Plan
from pipelines.stages.cache import kept_of
from pipelines.stages.cached_signals import make_signal
from pipelines.stages.compared_texts import as_plain_texts

CHARACTERS = 4  # approximate number per token


def planned_sizes(plan: Plan) -> list[tuple[str, str]]:
    """Returns (label, value) rows with the sizes of the data, models, cache and training of a run."""
    config, task, kind = plan.settings, plan.task, TASKS[plan.task]
    splits = kind.read(config.data, config.seed)
    teacher, student = copy.deepcopy(plan.teacher.config), copy.deepcopy(plan.student_config)
    for each in (teacher, student):
        if splits.labels:
            each.num_labels = len(splits.labels)
    big, small = (parameters(each, kind(()).auto) for each in (teacher, student))
    rows, what = len(splits.train) + len(splits.unlabelled), "texts"
    if issubclass(kind, Language):
        characters, what = sum(map(len, as_plain_texts(splits.train).texts)), "documents"
        rows = -(-characters // (CHARACTERS * config.data.max_length))
    general = config.general
    prose = f"{general.blocks:,} blocks" if general.blocks else "all"
    cached = config.loss.needs_teacher and config.teacher.signals == "cached"
    steps = config.train.epochs * -(-rows // (config.train.batch_size * config.train.accumulate))
    return [
        ("train / validation / test", f"{len(splits.train)} / {len(splits.validation)} / {len(splits.test)} {what}"),
        *([("unlabelled", f"{len(splits.unlabelled)} texts")] if what == "texts" else []),
        *([("plain text", f"{prose} of {general.data}, {general.train.epochs} epochs")] if general.data else []),
        ("task", f"{task}, {len(splits.labels)} label{'s' * (len(splits.labels) > 1)}" if splits.labels else task),
        ("teacher", f"{big / 1e6:.1f}M parameters, {4 * big / 1e6:.0f} MB"),
        ("student", f"{small / 1e6:.1f}M parameters, {4 * small / 1e6:.0f} MB"),
        *([("cache", f"at most {rows * cached_bytes(config, teacher, student, kind) / 1e6:.1f} MB")] if cached else []),
        ("student training", f"{config.train.epochs} epochs, {steps} steps"),
    ]


def cached_bytes(
    config: DistillConfig, teacher: PretrainedConfig, student: PretrainedConfig, task: type[Task]
) -> float:
    """Returns the maximum number of bytes that a text takes in the cache."""
    keep = kept_of(config, task, read_layer_sizes(teacher), read_layer_sizes(student))
    signals = [make_signal(name, task.name, keep, teacher, 0) for name in keep.signals.split(",")]
    once = [isinstance(s, Dense) and s.each == "sample" for s in signals]
    each = sum(s.nominal_bytes() * (1 if o else config.data.max_length) for s, o in zip(signals, once, strict=True))
    return each + ROW_BYTES + len(signals) * SIGNAL_BYTES
