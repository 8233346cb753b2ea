"""A plan: every pair of layouts of a distillation on some machines, and the fastest that fits."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

from transformers import PretrainedConfig

from distill.checkpoint.config import CONFIG_FILE, load_config
from distill.checkpoint.folder import locate_folder
from distill.data.config import USUAL_LENGTH
from distill.errors import InputError
from distill.student.build import student_config
from distill.student.spec import is_relative
from distill.tasks.choose import TASKS, choose_task
from distill.tasks.positions import find_max_tokens
from distill.tasks.sentence_embedding import SentenceEmbedding
from distill.tasks.task import Task
from pipelines.planner.hardware import Hardware
from pipelines.planner.layout_tracer import LayoutCandidate, LayoutTracer
from pipelines.planner.layouts import list_layouts
from pipelines.planner.machines import describe_hardware
from pipelines.planner.pairs import LayoutPair, list_pairs
from pipelines.planner.workload import Workload, set_labels
from pipelines.runs.console import Console
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.commands.plan import CPU, PlannerConfig
from pipelines.settings.defaults import fill_defaults, fill_task_defaults
from pipelines.settings.this_machine import count_cores
from pipelines.stages.dry_run import count_training_rows
from pipelines.stages.prepare.data import read_task_splits

Precision: TypeAlias = Literal["32", "bf16-mixed"]
MOST_WORKERS = 8  # processes that trace; each holds some hundred MB
CPU_PRECISION: Precision = "32"  # where none is requested
GPU_PRECISION: Precision = "bf16-mixed"


@dataclass(frozen=True)
class ClusterPlan:
    """All pairs of layouts, and what they follow from.

    Args:
        requested: Settings of the run, as the user wrote them.
        workload: What is trained.
        hardware: The machines.
        teachers: Layouts of the teacher.
        cached: Layouts of a student that reads a cache.
        online: Layouts of a student whose teacher computes in every step.
        pairs: The pairs that fit, the fastest first.
    """

    requested: DistillConfig
    workload: Workload
    hardware: Hardware
    teachers: Sequence[LayoutCandidate]
    cached: Sequence[LayoutCandidate]
    online: Sequence[LayoutCandidate]
    pairs: Sequence[LayoutPair]

    @property
    def chosen(self) -> LayoutPair:
        """The fastest pair."""
        return self.pairs[0]

    def find_fastest(self, signals: str) -> LayoutPair | None:
        """Returns the fastest pair with `cached` or with `online` signals; None if none fits."""
        return next((pair for pair in self.pairs if pair.signals == signals), None)


def make_plan(config: PlannerConfig, console: Console) -> ClusterPlan:
    """Returns the plan of a run on the machines in its settings.

    Raises:
        InputError: The models, the data and the settings can't be used together, or no pair of layouts fits.
    """
    requested = config.select_run()
    precision = CPU_PRECISION if config.cluster.gpu == CPU else GPU_PRECISION
    workload = describe_workload(requested, partial(count_data, config), precision)
    obstacle = find_obstacle(workload)
    if obstacle:
        raise InputError(obstacle)
    machine = workload.settings.machine
    hardware = describe_hardware(config.cluster, machine.precision, machine.threads)
    of_teacher = list_layouts(hardware, workload.teacher, trained=False)
    of_student = list_layouts(hardware, workload.student, trained=True, segments=workload.predicts_tokens)
    with console.track("planning", len(of_teacher) + 2 * len(of_student), "layouts") as advance:
        tracer = LayoutTracer(workload, hardware, partial(advance, 1), workers=min(MOST_WORKERS, count_cores()))
        teachers, cached = tracer.trace_teachers(of_teacher), tracer.trace_students(of_student)
        online = tracer.trace_online_students(cached, teachers)
    pairs = list_pairs(teachers, cached, online, workload, hardware)
    if not pairs:
        raise build_no_fit_error(teachers, [*cached, *online], hardware)
    return ClusterPlan(requested, workload, hardware, teachers, cached, online, pairs)


def describe_workload(
    settings: DistillConfig, count_data: Callable[[DistillConfig, type[Task]], tuple[int, int]], precision: Precision
) -> Workload:
    """Returns what a run trains.

    Args:
        settings: Settings of the run, as the user wrote them.
        count_data: Returns the number of training rows, and of labels (0: those of the teacher's head).
        precision: Precision of training if the settings leave it open.

    Raises:
        InputError: A checkpoint's config or the data is missing or invalid.
    """
    settings = fill_defaults(settings)
    teacher = copy.deepcopy(open_config(settings.teacher.model, "teacher"))
    name, _ = choose_task(settings.task, teacher, settings.teacher.model, settings.data)
    settings, task = fill_task_defaults(settings, name), TASKS[name]
    task.check(teacher, settings.teacher.model)
    spec = settings.student.spec
    student = student_config(teacher, spec) if is_relative(spec) else copy.deepcopy(open_config(spec, "student"))
    settings = fit_settings(settings, precision, teacher, student)
    rows, labels = count_data(settings, task)
    for model in (teacher, student):
        set_labels(model, task, labels or int(teacher.num_labels or 1))
    return Workload(settings, task, teacher, student, rows)


def find_obstacle(workload: Workload) -> str:
    """Returns why the layouts of a run can't be planned; empty if they can."""
    if not workload.settings.loss.needs_teacher:
        return "loss: expected a term that reads the teacher, found none: there is no pair of layouts to plan"
    if issubclass(workload.task, SentenceEmbedding):
        return "task sentence-embedding: expected another task: its models aren't traced"
    return ""


def open_config(name: str, role: str) -> PretrainedConfig:
    """Returns the config of a checkpoint, whose weights needn't be there.

    Raises:
        InputError: There is no such folder or hub model, or its config.json is invalid.
    """
    return load_config(locate_folder(name, role, [CONFIG_FILE]), role)


def count_data(config: PlannerConfig, settings: DistillConfig, task: type[Task]) -> tuple[int, int]:
    """Returns the number of training rows, and of labels (0: those of the teacher's head)."""
    if not config.data.path:
        return config.rows, config.labels
    with TemporaryDirectory(prefix="stillroom-") as scratch:
        splits = read_task_splits(task.name, settings.data, settings.seed, Path(scratch))
        return config.rows or count_training_rows(settings, task, splits), config.labels or len(splits.labels)


def fit_settings(
    settings: DistillConfig, precision: Precision, teacher: PretrainedConfig, student: PretrainedConfig
) -> DistillConfig:
    """Returns the settings with a precision, and with rows as long as both models allow."""
    limits = [max_tokens for each in (teacher, student) if (max_tokens := find_max_tokens(each)) is not None]
    length = min([settings.data.max_length or USUAL_LENGTH, *limits])
    machine = settings.machine
    return replace(
        settings,
        machine=replace(machine, precision=precision) if machine.precision == "auto" else machine,
        data=replace(settings.data, max_length=length),
    )


def build_no_fit_error(
    teachers: Sequence[LayoutCandidate], students: Sequence[LayoutCandidate], hardware: Hardware
) -> InputError:
    """Returns the error that no pair fits, with what would."""
    parts = []
    for role, choices in (("teacher", teachers), ("student", students)):
        traced = [choice for choice in choices if choice.trace is not None]
        if any(not choice.rejection for choice in traced):
            continue
        if not traced:
            reasons = dict.fromkeys(choice.rejection for choice in choices)
            parts.append(f"the {role} has no layout ({'; '.join(list(reasons)[:3])})")
            continue
        smallest = min(traced, key=lambda choice: choice.peak)
        parts.append(f"the {role} needs {smallest.peak / 1e9:,.3g} GB at least ({smallest.layout})")
    explanation = "; ".join(parts) or "each fits alone, but not both together"
    return InputError(
        f"layouts: expected a pair that fits into {hardware.processes} x {hardware.memory / 1e9:,.3g} GB, found none: "
        f"{explanation}; take more GPUs, or a smaller train.batch_size or data.max_length"
    )
