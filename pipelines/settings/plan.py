"""The plan of a run: everything that is decided before its first stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compress.prune.budget import Budget
from distill.checkpoint.checkpoint import Checkpoint
from distill.losses.config import LayerSizes
from distill.student.spec import is_relative
from pipelines.settings.attention_free_names import name_attention_free_students
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts
from pipelines.settings.layouts import Layouts
from pipelines.settings.rules.table import check_rules
from pipelines.settings.schemes import list_schemes, measured_scheme

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class RunPlan:
    """A run's settings and models, complete: no stage resolves a path, a task or a layout again.

    Only `machine.precision auto` stays open: a stage measures it on the run's own data.

    Args:
        settings: The settings with all defaults, of the task too.
        task_reason: Why the task was chosen, and by what texts are truncated, for the user.
        teacher: The teacher's checkpoint.
        additional_teachers: The checkpoints of further teachers.
        student: The student's checkpoint; None if it is built from the teacher.
        student_config: The config of the student that is built or loaded.
        teacher_sizes, student_sizes: Sizes of the layers that loss terms compare.
        layouts: Layouts on the processes.
        processes: Number of processes of the run.
        proposer: The masked language model whose words augmentation uses; None if it uses none.
        name_tagger: The tagger that finds the names of persons for cleaning; None if they stay.
    """

    settings: DistillConfig
    task_reason: str
    teacher: Checkpoint
    additional_teachers: tuple[Checkpoint, ...]
    student: Checkpoint | None
    student_config: "PretrainedConfig"
    teacher_sizes: LayerSizes
    student_sizes: LayerSizes
    layouts: Layouts
    processes: int = 1
    proposer: Checkpoint | None = None
    name_tagger: Checkpoint | None = None

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.settings.task

    @property
    def student_key(self) -> str:
        """The student in stage keys and in the comparison of processes: a checkpoint's path differs between machines.

        Its content is an input of stages.
        """
        spec = self.settings.student.spec
        return spec if is_relative(spec) else "checkpoint"

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the run's stages, in order."""
        return list_stages(self.settings)

    def check_precision(self, precision: str | None) -> None:
        """Applies the rules again, with the layouts and the precision of training, None while it isn't known.

        Raises:
            InputError: A rule rejects the combination.
        """
        layouts = self.layouts.teacher, self.layouts.student, self.layouts.finetuning
        check_rules(
            Facts(self.settings, self.processes, self.task, self.teacher, self.student, *layouts, precision=precision)
        )

    def rows(self) -> list[tuple[str, str]]:
        """Returns what was decided as (item, value) rows for the user."""
        s, layouts = self.settings, self.layouts
        source = "built from the teacher" if self.student is None else str(self.student.folder)
        return [
            ("task", f"{self.task} ({self.task_reason})"),
            ("teacher", str(self.teacher.folder)),
            *(("another teacher", str(each.folder)) for each in self.additional_teachers),
            ("student", f"{s.student.spec}, {source}, {self.student_sizes.layers} layers"),
            ("teacher's layout", str(layouts.teacher)),
            ("student's layout", str(layouts.student)),
            ("text length", f"{s.data.max_length} tokens"),
            ("precision", s.machine.precision),
        ]


@dataclass(frozen=True)
class SpeedTarget:
    """A target speed of the budget.

    Args:
        name: Part of its stages' names.
        speedup: Requested speed-up over the teacher; 0 if a latency or a throughput is requested.
        latency_ms: Requested milliseconds per call, also of a throughput; 0 if a speed-up is requested.
        max_bytes: Maximum size of the deployed files; None if unbounded.
        texts_per_second: Requested throughput; 0 if none is.
        correction: How much faster the shape is to be than the one that was searched for the target, because that one
            was evaluated as too slow.
    """

    name: str
    speedup: float
    latency_ms: float
    max_bytes: int | None = None
    texts_per_second: float = 0.0
    correction: float = 1.0

    def milliseconds(self, teacher_ms: float) -> float:
        """Returns the latency that the target allows, if the teacher's is `teacher_ms`."""
        return self.latency_ms or teacher_ms / self.speedup

    def share_reached(self, speedup: float, milliseconds: float) -> float:
        """Returns a speed relative to the requested one, from the speed-up or the milliseconds of a call."""
        return self.latency_ms / milliseconds if self.latency_ms else speedup / self.speedup

    @property
    def uncorrected(self) -> "SpeedTarget":
        """The target as requested."""
        return replace(self, correction=1.0)

    @property
    def corrected(self) -> "SpeedTarget":
        """The target that a search for a corrected shape aims at: faster than requested by the correction."""
        return replace(
            self.uncorrected,
            speedup=self.speedup * self.correction,
            latency_ms=self.latency_ms / self.correction,
            texts_per_second=self.texts_per_second * self.correction,
        )


def list_targets(budget: Budget) -> list[SpeedTarget]:
    """Returns the budget's targets, the slowest first."""
    if budget.texts_per_second:
        wanted = budget.texts_per_second
        milliseconds = 1e3 * budget.resolve().batch / wanted
        return [SpeedTarget(f"{wanted:g}tps", 0.0, milliseconds, budget.find_max_bytes(), wanted)]
    if budget.latency_ms:
        return [SpeedTarget(f"{budget.latency_ms:g}ms", 0.0, budget.latency_ms, budget.find_max_bytes())]
    return [SpeedTarget(f"{speedup:g}x", speedup, 0.0, budget.find_max_bytes(speedup)) for speedup in budget.speedups]


def round_name(target: SpeedTarget, number: int) -> str:
    """Returns the name of a round of the iterative schedule."""
    return f"{target.name}-round{number}"


def list_stages(settings: DistillConfig) -> tuple[str, ...]:
    """Returns the names of all stages of a run, in order."""
    parts = (
        ("general", [*first_stages(settings)]),
        ("teacher", ["teacher"]),
        ("cache", [*data_stages(settings), *signal_stages(settings)]),
        ("distill", [*student_stages(settings)]),
        ("report", [*delivery_stages(settings), "evaluate", "report"]),
    )
    last = [name for name, _ in parts].index(settings.until)
    return tuple(stage for _, stages in parts[: last + 1] for stage in stages)


def first_stages(settings: DistillConfig) -> list[str]:
    """Returns the names of the stages before the teacher."""
    measured = ["precision"] if settings.machine.precision == "auto" else []
    cleaned = ["clean"] if settings.clean.requested else []
    return ["data", *measured, *cleaned, *(["general"] if settings.general.data else [])]


def data_stages(settings: DistillConfig) -> list[str]:
    """Returns the stages after the teacher that change the student's data, but for one that reads the cache."""
    selects = settings.select.requested and not selects_from_cache(settings)
    return [*(["augment"] if settings.augment.requested else []), *(["select"] if selects else [])]


def selects_from_cache(settings: DistillConfig) -> bool:
    """Returns whether rows are selected by cached answers of the teacher."""
    return settings.select.needs_outputs and stores_signals(settings)


def stores_signals(settings: DistillConfig) -> bool:
    """Returns whether the teacher's signals are stored before the training."""
    is_trained_on = settings.loss.needs_teacher and (not settings.student.trained or settings.quantize.scheme != "")
    return is_trained_on and not settings.teacher.online


def signal_stages(settings: DistillConfig) -> list[str]:
    """Returns the stages that store what the teacher computes."""
    answers = ["answers"] if settings.sequences.share else []
    if not stores_signals(settings):
        return answers
    others = [f"teacher-{number}" for number in range(2, 2 + len(settings.teacher.additional))]
    selected = ["select"] if selects_from_cache(settings) else []
    return [*answers, *others, *(["ensemble"] if others else []), "cache", *selected]


def student_stages(settings: DistillConfig) -> list[str]:
    """Returns the stages that train and quantize the students."""
    if settings.student.trained:
        trained = [] if settings.student.spec == "teacher" else ["student-by-label"]
    elif not settings.budget.requested:
        trained = ["distill"]
    else:
        targets, trained = list_targets(settings.budget), ["start", "costs", "scores"]
        if settings.prune.nested:
            trained += nested_stages([target.name for target in targets])
        else:
            trained += [stage for target in targets for stage in pruning_stages(settings, target)]
        trained += [f"distill-{name}" for name in name_attention_free_students(settings.student)]
    quantized = [f"quantize{suffix}" for suffix in student_suffixes(settings)] if settings.quantize.scheme else []
    return [*trained, *quantized]


def pruning_stages(settings: DistillConfig, target: SpeedTarget) -> list[str]:
    """Returns the stages of a pruned student."""
    name, schedule = target.name, settings.prune.schedule
    if schedule == "gradual":
        return [f"shape-{name}", f"mask-{name}", f"distill-{name}"]
    rounds = [round_name(target, number) for number in range(1, settings.prune.rounds)]
    before = rounds if schedule == "iterative" else []
    return [f"{stage}-{each}" for each in before for stage in ("shape", "distill", "scores")] + [
        f"shape-{name}",
        f"distill-{name}",
    ]


def delivery_stages(settings: DistillConfig) -> list[str]:
    """Returns the stages that finish and export the models, and those that measure the requested speeds."""
    finished = ["biases", "export"] if settings.fit_class_biases else ["export"]
    models = ["-teacher", *student_suffixes(settings)]
    return [
        *(f"{stage}{model}" for model in models for stage in finished),
        *(f"speed-{target.name}" for target in list_measured_targets(settings)),
    ]


def list_measured_targets(settings: DistillConfig) -> list[SpeedTarget]:
    """Returns the budget's targets if a student is exported as the budget measures it, otherwise none."""
    return list_targets(settings.budget) if measured_scheme(settings) is not None else []


def nested_stages(names: Sequence[str]) -> list[str]:
    """Returns the stages of a nested family, by the names of its targets."""
    searched = [f"{stage}-{name}" for name in names[:-1] for stage in ("shape", "cut")]
    return [*searched, f"shape-{names[-1]}", *(f"distill-{name}" for name in names)]


def student_suffixes(settings: DistillConfig) -> list[str]:
    """Returns the suffix of the stages of each student: one for each target speed and quantization scheme."""
    targets = [f"-{target.name}" for target in list_targets(settings.budget)] if settings.budget.requested else [""]
    schemes: Sequence[str] = list(list_schemes(settings))
    others = ["", *(f"-{scheme}" for scheme in schemes[1:])]
    beside = [f"-{name}" for name in name_attention_free_students(settings.student)]
    return [*(f"{target}{other}" for target in targets for other in others), *beside]
