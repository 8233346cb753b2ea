"""Invalid combinations of settings with a task, several teachers, or a student with its own tokenizer."""

from collections.abc import Callable
from dataclasses import asdict

from distill.checkpoint.head_task import same_head
from distill.errors import InputError
from distill.losses.config import LAYER_TERMS, LossConfig, check_sparse_signals
from distill.tasks.names import GENERATIVE_TASKS, LANGUAGE_TASKS, default_signal
from pipelines.settings.commands.cache import KeepConfig
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.defaults import default_loss
from pipelines.settings.facts import Facts
from pipelines.settings.rules.rule import Check, Rule
from pipelines.settings.task_settings import STORED_FORM, run_task_arguments

ARGMAX_TASKS = ("text-classification", "token-classification")  # the class with the largest logit is predicted


def is_head_of_another_task(f: Facts) -> bool:
    """Returns whether the teacher has the head of another task."""
    teacher_task = f.teacher.task if f.teacher is not None else ""
    return bool(teacher_task and f.task and same_head(teacher_task) != same_head(f.task))


def check_task_packing(f: Facts) -> None:
    """Checks that the packing suits the task."""
    run_task_arguments(f.settings, f.task or "")


def check_ignored_keep(f: Facts) -> None:
    """Checks that no setting of keep is set that the task or the loss determines."""
    plain, language = KeepConfig(), f.task in LANGUAGE_TASKS
    default = plain.signals if language else default_signal(f.task or "")
    used = (*STORED_FORM, *(("signals", "draws", "k", "step") if language else ()))
    changed = {name: value for name, value in asdict(f.settings.keep).items() if value != getattr(plain, name)}
    for name, value in changed.items():
        if name not in used and (name, value) != ("signals", default):
            raise InputError(
                f"keep.{name}: expected none for {f.task}, found {value!r}: the loss determines what is stored; of "
                f"keep only {', '.join(used)} have an effect"
            )


def check_stored_part(f: Facts) -> None:
    """Checks that the loss can be computed from the part of a language model's output that is stored."""
    s = f.settings
    stored = default_signal(f.task or "") if s.keep.signals == "auto" else s.keep.signals
    if f.task in LANGUAGE_TASKS and not s.teacher.online and stored != "logits":
        check_sparse_signals(s.loss, stored)


def own_tokenizer_rule(
    setting: str, expected: str, rejects: Callable[[DistillConfig], object], found: str = ""
) -> Rule:
    """Returns a rule for a student with its own tokenizer; `found` describes the setting, by default as its value."""
    found = found or f"{{s.{setting}}}"
    return Rule(
        lambda s, f: f.own_tokenizer and rejects(s),
        f"{setting}: expected {expected} for a student with its own tokenizer, found {found}: token positions of "
        "teacher and student differ (student {s.student.spec!r})",
        ("own_tokenizer",),
    )


TASK_RULES: tuple[Rule | Check, ...] = (
    Rule(
        lambda s, f: s.on_policy.share and f.task not in GENERATIVE_TASKS,
        "on_policy.share {s.on_policy.share:g}: expected causal-lm or chat, found {f.task}: the student can't generate "
        "text",
        ("task",),
    ),
    Rule(
        lambda s, f: s.on_policy.share and not s.teacher.online,
        "on_policy.share {s.on_policy.share:g}: expected teacher.online true, found false: a cache has no signals "
        "for sequences that the student generates later",
        ("task",),
    ),
    Rule(
        lambda s, f: s.sequences.share and f.task != "chat",
        "sequences.share {s.sequences.share:g}: expected chat, found {f.task}: there are no answers that the teacher "
        "could generate",
        ("task",),
    ),
    Rule(
        lambda s, f: is_head_of_another_task(f),
        "--task {f.task}: the teacher {f.teacher.name!r} was trained for {f.teacher.task}: its outputs have another "
        "meaning",
        ("task", "teacher"),
    ),
    Check(check_task_packing, ("task",)),
    Check(check_ignored_keep, ("task",)),
    Rule(
        lambda s, f: s.general.data and f.task in ("sentence-embedding", *LANGUAGE_TASKS),
        "general.data: expected a task with labels after the plain text, found {f.task}",
        ("task",),
    ),
    Rule(
        lambda s, f: f.task == "sentence-embedding" and s.teacher.finetune == "always",
        "teacher.finetune always: expected auto or never for sentence-embedding, which has no labels",
        ("task",),
    ),
    Rule(
        lambda s, f: s.fit_class_biases and f.task not in ARGMAX_TASKS,
        "fit_class_biases: expected text-classification with one class per text, or token-classification, found "
        "{f.task}: its predictions aren't the argmax of class logits",
        ("task",),
    ),
    Rule(
        lambda s, f: s.teacher.additional and f.task != "text-classification",
        "teacher.additional: expected text-classification with one class per text, found {f.task}: predictions of "
        "several teachers can only be mixed there",
        ("task",),
    ),
    Rule(
        lambda s, f: f.task == "sentence-embedding" and not s.loss.uses_vectors,
        "loss: expected loss.embedding or loss.similarity, and no kl or ce, for sentence-embedding, found "
        "{s.loss.terms}: there is nothing to compare",
        ("task",),
    ),
    Rule(
        lambda s, f: f.task != "sentence-embedding" and s.loss.uses_vectors,
        "loss: expected kl or ce for {f.task}, found {s.loss.terms}: there is nothing to compare",
        ("task",),
    ),
    Check(check_stored_part, ("task",)),
)


TEACHER_RULES: tuple[Rule | Check, ...] = (
    *(
        Rule(
            lambda s, f, name=name: s.teacher.additional and s.loss.computes(name),  # type: ignore[misc]
            f"loss.{name}: expected 0 with several teachers, found {{s.loss.{name}}}: they have no layers in common",
        )
        for name in LAYER_TERMS
    ),
    Rule(
        lambda s, f: s.teacher.additional and "temperature" in s.loss.ramps,
        "loss.ramps temperature: expected none with several teachers: they are mixed at one temperature",
    ),
    Rule(
        lambda s, f: s.teacher.additional and f.teacher_layout is not None and f.teacher_layout.sharded,
        "teacher.layout {f.teacher_layout}: expected replicated with several teachers: each process queries all of "
        "them",
        ("teacher_layout",),
    ),
)


TOKENIZER_RULES: tuple[Rule | Check, ...] = (
    own_tokenizer_rule("teacher.online", "true", lambda s: not s.teacher.online, found="false"),
    own_tokenizer_rule(
        "loss",
        "kl and ce",
        lambda s: s.loss.computes(*LAYER_TERMS) or s.loss.divergence != LossConfig().divergence,
    ),
    Rule(
        lambda s, f: f.own_tokenizer and f.processes > 1,
        "machine.devices: expected one process for a student with its own tokenizer, found {f.processes}: token "
        "positions of teacher and student differ (student {s.student.spec!r})",
        ("own_tokenizer",),
    ),
    own_tokenizer_rule("teacher.processes", "0", lambda s: s.teacher.processes > 0),
    own_tokenizer_rule("on_policy.share", "0", lambda s: s.on_policy.share > 0),
    own_tokenizer_rule("train.backward_window", "0", lambda s: s.train.backward_window > 0),
    own_tokenizer_rule("train.batch_tokens", "0", lambda s: s.train.batch_tokens > 0),
    own_tokenizer_rule("data.packing", "auto", lambda s: s.data.packing not in ("auto", "stream")),
    Rule(
        lambda s, f: (
            f.own_tokenizer
            and (
                s.loss.resolved_temperature != default_loss(f.task or "").resolved_temperature
                or "temperature" in s.loss.ramps
            )
        ),
        "loss.temperature: expected none for a student with its own tokenizer, found one: there "
        "cross_tokenizer.temperature softens both distributions, and this one has no effect",
        ("own_tokenizer", "task"),
    ),
    Rule(
        lambda s, f: f.own_tokenizer and s.cross_tokenizer.kind == "sorted" and not s.loss.computes("ce"),
        "cross_tokenizer.kind sorted: expected loss.ce above 0, found 0: sorted distributions show how confident the "
        "teacher is, and not in which token",
        ("own_tokenizer",),
    ),
)
