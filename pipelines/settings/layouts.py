"""The parallel layouts of the teacher and the student, determined and checked before any weight is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import InputError
from distill.parallel.layout import Layout, fitting_model, parse_layout
from pipelines.settings.deepspeed_json import check_strategy
from pipelines.settings.distill_config import DistillConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHARE = 0.5  # of a process's memory for weights, gradients and optimizer state; activations need the rest
TRAINED_BYTES = 16  # per parameter: the fp32 weight, its gradient and AdamW's two moments


@dataclass(frozen=True)
class Layouts:
    """Layouts of a run's two models on its processes."""

    teacher: Layout
    student: Layout
    tuned: Layout  # the teacher during its own training, on the student's processes


def layouts_of(config: DistillConfig, source: Path, processes: int) -> Layouts:
    """Returns the layouts that the configuration requests; `auto` is resolved from model sizes and total memory.

    Raises:
        InputError: A layout is for a different number of processes, or a model doesn't support it.
    """
    from transformers import AutoConfig

    from distill.checkpoint.folder import checkpoint_folder
    from distill.student.build import student_config
    from distill.student.spec import is_relative

    teacher = AutoConfig.from_pretrained(source)
    if is_relative(config.student.spec):
        student = student_config(teacher, config.student.spec)
    else:
        student = AutoConfig.from_pretrained(checkpoint_folder(config.student.spec, "student"))
    models = {"teacher": teacher, "student": student, "tuned": teacher}
    found = Layouts(**{each.whose: resolve_layout(each, models[each.whose]) for each in texts_of(config, processes)})
    check_layouts(config, found.teacher, found.student)
    return found


@dataclass(frozen=True)
class LayoutSetting:
    """A layout as written in the settings.

    Args:
        whose: Field of `Layouts`.
        name: Name of the setting.
        text: Value of the setting; `auto` is resolved from sizes.
        processes: Number of processes that the layout is for.
    """

    whose: str
    name: str
    text: str
    processes: int

    def parsed(self) -> Layout | None:
        """Returns the layout, or None if it depends on sizes.

        Raises:
            InputError: The layout is invalid, or for a different number of processes.
        """
        if self.text == "auto":
            return Layout() if self.processes == 1 else None
        return parse_layout(self.text, self.processes, self.name)


def texts_of(config: DistillConfig, processes: int) -> tuple[LayoutSetting, LayoutSetting, LayoutSetting]:
    """Returns the requested layouts of the teacher, of the student, and of the teacher during its own training.

    Raises:
        InputError: No process is left for the student, or the strategy is unavailable.
    """
    own, text, others = config.teacher.ranks, config.teacher.layout, config.student.layout
    if own and own >= processes:
        raise InputError(
            f"teacher.ranks {own}: expected fewer than the {processes} processes, for the student needs some; start "
            "more (--devices, or torchrun)"
        )
    tuned = "auto" if own else text
    if config.machine.strategy:
        check_deepspeed(config)
        others = tuned = "replicated"  # DeepSpeed shards the model itself
    return (
        LayoutSetting("teacher", "teacher.layout", text, own or processes),
        LayoutSetting("student", "student.layout", others, processes - own),
        LayoutSetting("tuned", "teacher.layout", tuned, processes - own),
    )


def check_layouts(config: DistillConfig, teacher: Layout | None, student: Layout | None) -> None:
    """Checks the settings that depend on layouts; an undetermined layout (None) is not checked.

    Raises:
        InputError: Gradient compression is requested without replicas that exchange gradients, or offloading for
            weights that aren't sharded.
    """
    if student is not None:
        check_compress(config, student)
    for name, offload, layout in (
        ("teacher", config.teacher.offload, teacher),
        ("student", config.student.offload, student),
    ):
        if offload and layout is not None and layout.fsdp == 1 and layout.zero != 2:
            raise InputError(
                f"{name}.offload: goes with weights that FSDP cuts, and {name}.layout is {layout}; use fsdp=N or zero2"
            )


def check_compress(config: DistillConfig, student: Layout) -> None:
    """Checks that gradient compression is only requested if replicas of the student exchange gradients.

    Raises:
        InputError: The student isn't replicated.
    """
    if config.machine.compress != "none" and (student.sharded or student.zero == 2 or config.machine.strategy):
        raise InputError(
            f"machine.compress {config.machine.compress}: expected a student that every process has a copy of, found "
            f"{config.machine.strategy or student}, whose gradients are sent in their own way; use replicated or "
            "zero1, or leave it out"
        )


def check_deepspeed(config: DistillConfig) -> None:
    """Checks that DeepSpeed is available and that no layout of the student is set beside it.

    Raises:
        InputError: DeepSpeed is unavailable, or the student has a layout too.
    """
    check_strategy(config.machine.strategy)
    if config.student.layout not in ("auto", "replicated"):
        raise InputError(
            f"machine.strategy {config.machine.strategy!r}: DeepSpeed lays the student out, and --student.layout "
            f"{config.student.layout!r} does it too; leave one of them away"
        )


def resolve_layout(wanted: LayoutSetting, model: Any) -> Layout:
    layout = wanted.parsed()
    if layout is None:
        layout = parse_layout(fitting_kind(model, wanted.processes), wanted.processes, wanted.name)
    fitting_model(layout, model, wanted.name)
    return layout


def fitting_kind(own: Any, processes: int) -> str:
    if parameters(own) * TRAINED_BYTES <= SHARE * memory_of_process(processes):
        return "replicated"
    return f"fsdp={processes}"


def memory_of_process(processes: int) -> float:
    """Returns the bytes of memory per process: the GPU's, or the process's share of the machine's RAM."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / here


def parameters(config: "PretrainedConfig", auto: Any = None) -> int:
    """Returns the number of parameters of a model with this config, counted without allocating memory.

    `auto` is the auto class that builds the model; it is inferred from the config if omitted.
    """
    import torch
    import transformers

    from compress.prune.slicing.checkpoint import auto_class_of

    with torch.device("meta"):
        built = auto or getattr(transformers, auto_class_of(config.to_dict()))
        return built.from_config(config).num_parameters()
