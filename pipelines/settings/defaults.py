"""Defaults that depend on other settings or on the task, filled in here and nowhere else."""

from dataclasses import replace
from typing import cast

from compress.quantize.config import AUTO_MIN_SCORE
from distill.losses.config import LossConfig
from distill.student.spec import is_attention_free, parse_spec
from distill.tasks.names import ATTENTION_FREE_TASKS, LANGUAGE_TASKS
from distill.train.optimizer_kinds import ADAMW_RATE
from pipelines.settings.commands.distill import DistillConfig, TaskName

# Learning rates of AdamW where none is given: general stage, fine-tuning of a teacher, students without attention.
GENERAL_RATE, TEACHER_RATE, ATTENTION_FREE_RATE = 5e-4, 5e-5, 5e-3
# Students without attention of a frontier, from the smallest to the largest of each kind.
FRONTIER_SPECS = ("static,embeddings=64", "static", "cnn,hidden=128", "cnn", "gru,hidden=128", "gru")
# Squared differences of cosines are a hundredth of those of vectors.
SENTENCE_EMBEDDING_LOSS = LossConfig(kl=0, embedding=1, similarity=10)


def fill_defaults(settings: DistillConfig) -> DistillConfig:
    """Returns the settings with every default filled in that depends on other settings."""
    budget, quantize, student = settings.budget.resolve(), settings.quantize, settings.student
    if quantize.scheme == "auto":
        quantize = replace(quantize, scheme="int8", min_score_share=quantize.min_score_share or AUTO_MIN_SCORE)
    if quantize.scheme and budget.min_score_share and not budget.requested:
        quantize = replace(quantize, min_score_share=budget.min_score_share)
    if not student.spec:
        student = replace(student, spec="teacher" if budget.requested else "distilbert")
    general = replace(settings.general, train=settings.general.train.resolve(GENERAL_RATE))
    rate = ATTENTION_FREE_RATE if is_attention_free(student.spec) else ADAMW_RATE
    return replace(
        settings,
        budget=budget,
        quantize=quantize,
        student=student,
        general=general,
        train=settings.train.resolve(rate),
        attention_free_train=settings.attention_free_train.resolve(ATTENTION_FREE_RATE),
        teacher_train=settings.teacher_train.resolve(TEACHER_RATE),
    )


def fill_task_defaults(settings: DistillConfig, task: str) -> DistillConfig:
    """Returns the settings for a task, with the task's defaults where nothing else is requested."""
    loss = default_loss(task) if settings.loss == LossConfig() else settings.loss
    if loss.temperature is None:
        loss = replace(loss, temperature=default_loss(task).resolved_temperature)
    general = settings.general
    general = replace(general, loss=replace(general.loss, temperature=general.loss.resolved_temperature))
    # Layers of different shapes need modelling code in the checkpoint, which pooled encoders don't have.
    uniform = task == "sentence-embedding" and settings.budget.requested
    budget = replace(settings.budget, uniform=True) if uniform else settings.budget
    student = settings.student
    if budget.frontier and not student.attention_free:
        student = replace(student, attention_free=";".join(spec for spec in FRONTIER_SPECS if can_do(spec, task)))
    return replace(settings, task=cast(TaskName, task), loss=loss, general=general, budget=budget, student=student)


def can_do(spec: str, task: str) -> bool:
    """Returns whether a student without attention can do a task."""
    return task in ATTENTION_FREE_TASKS[parse_spec(spec).preset]


def default_loss(task: str) -> LossConfig:
    """Returns the default loss of a task.

    A distribution over a vocabulary is nearly uniform at temperature 2: over 30,522 tokens it has 9.6 nats of at most
    10.3, and the few tokens that a cache stores carry almost no information.
    """
    if task == "sentence-embedding":
        return SENTENCE_EMBEDDING_LOSS
    return LossConfig(temperature=1) if task in LANGUAGE_TASKS else LossConfig()
