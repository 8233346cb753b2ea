"""Layouts that a run leaves to the planner: `auto`, where a model doesn't easily fit into each process's memory."""

from dataclasses import replace

from distill.parallel.layout import Layout, parse_layout
from distill.tasks.names import LANGUAGE_TASKS
from distill.train.config import AUTO
from pipelines.planner.hardware import Hardware
from pipelines.planner.layout_tracer import LayoutTracer
from pipelines.planner.layouts import list_layouts
from pipelines.planner.machines import describe_this_machine
from pipelines.planner.pairs import list_pairs
from pipelines.planner.plan import CPU_PRECISION, GPU_PRECISION, build_no_fit_error, describe_workload, find_obstacle
from pipelines.planner.workload import Workload
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.layouts import SHARE, TRAINED_BYTES, leaves_layout_open

ROWS = 10_000  # the fastest pair depends little on their number


def fill_layouts(settings: DistillConfig, processes: int, hardware: Hardware | None = None) -> DistillConfig:
    """Returns the settings with the layouts of the fastest pair that fits, in place of `auto`.

    They stay `auto`, which is resolved by the size of a model alone, where both models are small, for runs that aren't
    planned (see `leaves_layout_open` and `find_obstacle`), and for models that can't be traced.

    Args:
        settings: Settings of a run.
        processes: Number of its processes.
        hardware: The machines; this one and others like it if None.

    Raises:
        InputError: The models can't be used together, or no pair fits.
    """
    if not leaves_layout_open(settings, processes):
        return settings
    hardware = hardware or describe_this_machine(processes, settings.machine.precision)
    precision = GPU_PRECISION if hardware.can_overlap else CPU_PRECISION
    workload = describe_workload(settings, lambda settings, task: (ROWS, 0), precision)
    if find_obstacle(workload):
        return settings
    if max(workload.teacher_parameters, workload.student_parameters) * TRAINED_BYTES <= SHARE * hardware.memory:
        return settings
    return choose_pair(settings, workload, hardware)


def choose_pair(settings: DistillConfig, workload: Workload, hardware: Hardware) -> DistillConfig:
    """Returns the settings with the layouts of the fastest pair that fits.

    Raises:
        InputError: No pair fits.
    """
    tracer, is_online = LayoutTracer(workload, hardware), settings.teacher.online
    teachers = tracer.trace_teachers(list_teacher_layouts(settings, workload, hardware))
    students = tracer.trace_students(select_layouts(settings.student.layout, hardware), online=is_online)
    pairs = list_pairs(teachers, () if is_online else students, students if is_online else (), workload, hardware)
    if not pairs and any(choice.failed for choice in (*teachers, *students)):
        return settings
    if not pairs:
        raise build_no_fit_error(teachers, students, hardware)
    chosen = pairs[0]
    assert chosen.student.train is not None
    train = settings.train
    if train.checkpointing == "none":  # a pair may fit only with less memory for activations
        train = replace(train, checkpointing=chosen.student.train.checkpointing)
    return replace(
        settings,
        teacher=replace(settings.teacher, layout=str(chosen.teacher.layout)),
        student=replace(settings.student, layout=str(chosen.student.layout), offload=chosen.student.offloaded > 0),
        train=train,
    )


def select_layouts(text: str, hardware: Hardware) -> list[Layout]:
    """Returns the layout that a setting names; none for `auto`, which leaves the choice."""
    return [] if text == AUTO else [parse_layout(text, hardware.processes)]


def list_teacher_layouts(settings: DistillConfig, workload: Workload, hardware: Hardware) -> list[Layout]:
    """Returns the layouts that a teacher may have, where it is trained first with room for its states."""
    named = select_layouts(settings.teacher.layout, hardware)
    is_trained = settings.teacher.finetune != "never" and workload.task.name not in LANGUAGE_TASKS
    if named or not is_trained:
        return named
    layouts = list_layouts(hardware, workload.teacher, trained=False)
    states = workload.teacher_parameters * TRAINED_BYTES
    roomy = [layout for layout in layouts if states / layout.shards <= SHARE * hardware.memory]
    return roomy or [max(layouts, key=lambda layout: layout.shards)]
