"""Invalid combinations of settings with context parallelism: layouts with cp."""

from collections.abc import Iterator

from distill.errors import InputError
from distill.parallel.layout import Layout
from distill.tasks.names import LANGUAGE_TASKS
from distill.train.config import AUTO
from pipelines.settings.facts import Facts

_WHOLE_TEXTS = "it reads all positions of a text in one place"


def check_segment_task(who: str, f: Facts) -> None:
    """Checks that a model with segments has an output and a label for each position.

    Raises:
        InputError: The task has other outputs or scores.
    """
    layout = f.student_layout if who == "student" else f.teacher_layout
    assert layout is not None
    if layout.cp > 1 and f.task not in LANGUAGE_TASKS:
        raise InputError(
            f"{who}.layout {layout}: expected {', '.join(LANGUAGE_TASKS)} with cp, found {f.task}: {_WHOLE_TEXTS}; use "
            "replicated or fsdp"
        )


def check_student_segments(f: Facts) -> None:
    """Checks that a student can be trained on segments.

    Raises:
        InputError: A setting needs whole rows on each process.
    """
    assert f.student_layout is not None
    for name, found, expected, reason in list_student_conflicts(f) if f.student_layout.cp > 1 else ():
        raise InputError(f"{name}: expected {expected} with student.layout {f.student_layout}, found {found}: {reason}")


def list_student_conflicts(f: Facts) -> Iterator[tuple[str, object, str, str]]:
    """Yields (setting, what was found, what is expected, why) for each setting that needs whole rows."""
    s, loss, apart = f.settings, f.settings.loss, f.settings.teacher.processes
    yield from (
        (name, found, expected, reason)
        for name, found, expected, reason, is_rejected in (
            *(
                (f"loss.{name}", loss.peak_weight(name), "0", "it compares each position with all others", True)
                for name in ("attention", "relations")
                if loss.computes(name)
            ),
            (
                "loss.balance_every",
                loss.balance_every,
                "0",
                "a process has a part of a term's gradient",
                loss.balance_every,
            ),
            ("on_policy.share", s.on_policy.share, "0", "texts are generated token by token", s.on_policy.share),
            ("general.data", s.general.data, "none", "its terms compare whole texts", s.general.data),
            ("budget", "a target speed", "none", "pruned layers have different heads", s.budget.requested),
            ("machine.rank_speeds", s.machine.rank_speeds, "none", "rows are computed together", s.machine.rank_speeds),
            ("machine.memory", s.machine.memory, "none", "steps are measured on whole rows", s.machine.memory),
            ("train.checkpointing", AUTO, "a mode", "steps are measured on whole rows", s.train.checkpointing == AUTO),
            ("teacher.processes", apart, "0", "processes of its own are sent whole rows", apart),
            ("student", "a tokenizer of its own", "the teacher's", _WHOLE_TEXTS, f.own_tokenizer),
        )
        if is_rejected
    )


def check_teacher_segments(f: Facts) -> None:
    """Checks that a teacher computes nothing but signals of segments, in the steps of a student that has them too.

    Raises:
        InputError: It writes a cache, generates texts, or has other segments than the student.
    """
    s, layout, student = f.settings, f.teacher_layout, f.student_layout
    assert layout is not None
    is_queried = s.teacher.online and s.loss.needs_teacher
    if layout.cp > 1 and (not s.teacher.online or s.teacher.processes):
        apart = s.teacher.processes
        found = f"teacher.processes {apart}" if apart else "false: cached signals are those of whole texts"
        raise InputError(
            f"teacher.layout {layout}: expected teacher.online true and teacher.processes 0 with cp, found {found}; "
            "use replicated, fsdp, tp or pp"
        )
    if layout.cp > 1 and s.sequences.share:
        raise InputError(
            f"teacher.layout {layout}: expected sequences.share 0 with cp, found {s.sequences.share:g}: answers are "
            "generated token by token"
        )
    if student is not None and is_queried and not s.teacher.processes and layout.cp != student.cp:
        raise InputError(
            f"teacher.layout {layout}: expected {_describe_segments(student)}, as student.layout {student} has, found "
            f"{_describe_segments(layout)}: the teacher is queried for the positions that the student computes"
        )


def _describe_segments(layout: Layout) -> str:
    return f"cp={layout.cp}" if layout.cp > 1 else "a layout without cp"
