"""What is refused of a student without attention: static, cnn and gru."""

from collections.abc import Iterator

from distill.errors import InputError
from distill.losses.config import LAYER_TERMS
from distill.student.spec import StudentSpec, is_relative, parse_spec
from distill.tasks.names import LANGUAGE
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.facts import Facts

CLASSIFYING = ("text-classification", "multi-label", "regression")
TAGGING = "token-classification"
TASKS = {"static": CLASSIFYING, "cnn": (*CLASSIFYING, TAGGING), "gru": (*CLASSIFYING, TAGGING)}


def check_vector_student(f: Facts) -> None:
    """Checks the settings of a run whose student has no attention.

    Raises:
        InputError: A setting can't be used with it.
    """
    spec = f.settings.student.spec
    given = parse_spec(spec) if is_relative(spec) else None
    if given is None or not given.is_vectors:
        return
    for name, found, expected in list_vector_conflicts(f.settings):
        raise InputError(f"{name}: expected {expected} with student {spec!r}, found {found}")
    check_vector_task(f.task, given)
    layout = f.student_layout
    if layout is not None and layout.sharded:
        raise InputError(
            f"student.layout {layout}: expected replicated with student {spec!r}: it has no layers to divide"
        )


def check_vector_task(task: str | None, given: StudentSpec) -> None:
    """Checks that a student without attention can do the task.

    Raises:
        InputError: It can't; the message names the students that can.
    """
    tasks = TASKS[given.preset]
    if task is None or task in tasks:
        return
    others = [preset for preset, able in TASKS.items() if task in able]
    reason = (
        "it would have to know the words in between" if task in LANGUAGE else "its output needs every token's context"
    )
    raise InputError(
        f"student {given.text!r}: expected {', '.join(tasks)}, found {task}: {reason}; take "
        + (" or ".join(others) if others else "a student with attention, such as layers=2")
    )


def list_vector_conflicts(s: DistillConfig) -> Iterator[tuple[str, object, str]]:
    """Yields (setting, what was found, what is expected) for each setting that such a student can't be trained with."""
    yield from (
        (name, found, expected)
        for name, found, expected, is_refused in (
            ("budget", "a target speed", "none: it isn't pruned", s.budget.requested),
            ("quantize.scheme", s.quantize.scheme, "none", s.quantize.scheme),
            ("sparsity.pattern", s.sparsity.pattern, "none", s.sparsity.requested),
            ("general.data", s.general.data, "none: it has no layers to train on text", s.general.data),
            ("loss", "a term on layers", "no term on layers, of which it has none like the teacher's",
             s.loss.computes(*LAYER_TERMS)),
            ("train.checkpointing", s.train.checkpointing, "none", s.train.checkpointing not in ("none", "auto")),
            ("train.backward_window", s.train.backward_window, "0", s.train.backward_window),
        )
        if is_refused
    )  # fmt: skip
