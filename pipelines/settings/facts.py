"""What is known about a run besides its settings: the task, the checkpoints, the layouts and the precision."""

from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

from distill.checkpoint.checkpoint import Checkpoint
from distill.parallel.layout import Layout
from distill.student.family import FAMILIES, find_family
from distill.student.sizes import Sizes
from distill.student.spec import ATTENTION_FREE_PRESETS, BOTTLENECK_PRESETS, is_relative, parse_spec, resolve_sizes
from pipelines.settings.commands.distill import DistillConfig


@dataclass(frozen=True)
class Facts:
    """The settings of a run and what is known about it so far; None is what isn't known yet.

    Args:
        settings: The settings, with the defaults of `pipelines.settings.defaults`.
        processes: Number of processes of the run.
        task: Name of the task.
        teacher: The teacher's checkpoint; None also while it would have to be downloaded.
        student: The student's checkpoint; None also for a student that is built from the teacher.
        teacher_layout: Layout of the teacher.
        student_layout: Layout of the student.
        finetuning_layout: Layout of the teacher during its own training.
        precision: Precision of training.
        own_tokenizer: Whether the student's tokenizer differs from the teacher's.
        opened: True once the checkpoints on this machine have been opened.
    """

    settings: DistillConfig
    processes: int
    task: str | None = None
    teacher: Checkpoint | None = None
    student: Checkpoint | None = None
    teacher_layout: Layout | None = None
    student_layout: Layout | None = None
    finetuning_layout: Layout | None = None
    precision: str | None = None
    own_tokenizer: bool | None = None
    opened: bool | None = None

    @property
    def is_student_built(self) -> bool:
        """Whether the student is built from the teacher rather than loaded from a checkpoint."""
        return is_relative(self.settings.student.spec)

    @property
    def student_processes(self) -> str:
        """Number of processes that train the student, with DeepSpeed if it is used, for messages."""
        count = "" if self.student_layout is None else str(self.student_layout.processes)
        return f"{count} with DeepSpeed" if self.settings.machine.deepspeed else count

    @property
    def teacher_sizes(self) -> Sizes | None:
        """Sizes of the teacher; None if unknown."""
        return None if self.teacher is None else read_stored_sizes(self.teacher)

    @property
    def student_sizes(self) -> Sizes | None:
        """Sizes of the student; None if unknown.

        Raises:
            InputError: No student of the teacher can have the requested sizes.
        """
        spec, teacher = self.settings.student.spec, self.teacher_sizes
        if not is_relative(spec):
            return None if self.student is None else read_stored_sizes(self.student)
        if spec == "teacher":
            return teacher
        if self.teacher is not None:
            check_family(self.teacher)
        return (
            None
            if teacher is None or parse_spec(spec).preset in (*BOTTLENECK_PRESETS, *ATTENTION_FREE_PRESETS)
            else resolve_sizes(spec, teacher)
        )


def check_family(checkpoint: Checkpoint) -> None:
    """Checks that students can be built from this architecture.

    Raises:
        InputError: No student can be built from this family of models.
    """
    if "auto_map" not in checkpoint.description:
        with suppress(AttributeError):
            find_family(SimpleNamespace(**checkpoint.description))  # type: ignore[arg-type]


def read_stored_sizes(checkpoint: Checkpoint) -> Sizes | None:
    """Returns the sizes in a checkpoint's config.json; None if its family isn't supported or a size is left out.

    For a size that is left out, transformers has a default, which is known once the config's class is loaded.
    """
    config = SimpleNamespace(**checkpoint.description)
    if checkpoint.model_type not in FAMILIES or "auto_map" in checkpoint.description:
        return None
    try:
        family = find_family(config)  # type: ignore[arg-type]
        if family.config_sets_head_width and not {"num_key_value_heads", "head_dim"} <= checkpoint.description.keys():
            return None
        sizes = family.sizes(config)  # type: ignore[arg-type]
    except (AttributeError, TypeError, ZeroDivisionError):
        return None
    whole = all(isinstance(size, int) for size in (sizes.hidden, sizes.heads, sizes.ffn))
    return sizes if whole else None  # the config's class reports the wrong size by name
