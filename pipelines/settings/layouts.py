"""The parallel layouts of the teacher and the student, determined and checked before any weight is loaded."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distill.parallel.layout import Layout, check_model_fits, parse_layout
from distill.train.config import AUTO
from pipelines.settings.commands.distill import DistillConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from distill.checkpoint.auto_class import AutoClass

SHARE = 0.5  # of a process's memory for weights, gradients and optimizer state; activations need the rest
TRAINED_BYTES = 16  # per parameter: the fp32 weight, its gradient and AdamW's two moments


@dataclass(frozen=True)
class Layouts:
    """Layouts of a run's two models on its processes."""

    teacher: Layout
    student: Layout
    finetuning: Layout  # the teacher during its own training, on the student's processes


@dataclass(frozen=True)
class LayoutSetting:
    """A layout as written in the settings.

    Args:
        model: Field of `Layouts`.
        name: Name of the setting.
        text: Value of the setting; `auto` is resolved from sizes.
        processes: Number of processes that the layout is for.
    """

    model: str
    name: str
    text: str
    processes: int

    def parsed(self) -> Layout | None:
        """Returns the layout, or None if it depends on sizes.

        Raises:
            InputError: The layout is invalid, or for a different number of processes.
        """
        if self.text == AUTO:
            return Layout() if self.processes == 1 else None
        return parse_layout(self.text, self.processes, self.name)


def layout_settings(config: DistillConfig, processes: int) -> tuple[LayoutSetting, LayoutSetting, LayoutSetting]:
    """Returns the requested layouts of the teacher, of the student, and of the teacher during its own training."""
    ranks, teacher, student = config.teacher.processes, choose_teacher_layout(config), config.student.layout
    finetuning = AUTO if ranks else teacher
    if config.machine.deepspeed:
        student = finetuning = "replicated"  # DeepSpeed shards the model itself
    return (
        LayoutSetting("teacher", "teacher.layout", teacher, ranks or processes),
        LayoutSetting("student", "student.layout", student, processes - ranks),
        LayoutSetting("finetuning", "teacher.layout", finetuning, processes - ranks),
    )


def choose_teacher_layout(config: DistillConfig) -> str:
    """Returns the teacher's layout as written; for `auto`, the student's if it is queried for segments."""
    is_queried = config.teacher.online and not config.teacher.processes
    is_copied = config.teacher.layout == AUTO and is_queried and "cp=" in config.student.layout
    return config.student.layout if is_copied else config.teacher.layout


def leaves_layout_open(config: DistillConfig, processes: int) -> bool:
    """Returns whether a layout is to be chosen from predictions.

    DeepSpeed shards models itself, and processes for the teacher only aren't planned.
    """
    is_open = AUTO in (choose_teacher_layout(config), config.student.layout)
    return processes > 1 and is_open and not config.machine.deepspeed and not config.teacher.processes


def resolve_layout(wanted: LayoutSetting, model: "PretrainedConfig") -> Layout:
    """Returns the layout that a setting requests for a model; `auto` is resolved from its size and the memory.

    Raises:
        InputError: The layout is for a different number of processes, or the model doesn't support it.
    """
    layout = wanted.parsed()
    if layout is None:
        layout = parse_layout(choose_layout(model, wanted.processes), wanted.processes, wanted.name)
    check_model_fits(layout, model, wanted.name)
    return layout


def choose_layout(model: "PretrainedConfig", processes: int) -> str:
    """Returns `replicated` if a model and its training state fit into a process's memory, otherwise `fsdp=N`."""
    if count_parameters(model) * TRAINED_BYTES <= SHARE * process_memory(processes):
        return "replicated"
    return f"fsdp={processes}"


def read_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process_memory(processes: int) -> float:
    """Returns the bytes of memory per process: the GPU's, or the process's share of the machine's RAM."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return read_memory() / local_processes


def count_parameters(config: "PretrainedConfig", auto: "AutoClass | None" = None) -> int:
    """Returns the number of parameters of a model with this config, counted without allocating memory.

    `auto` is the auto class that builds the model; it is inferred from the config if omitted.
    """
    import torch
    import transformers

    from distill.checkpoint.custom_models import choose_auto_class

    with torch.device("meta"):
        auto_class: AutoClass = auto or getattr(transformers, choose_auto_class(config.to_dict()))
        return auto_class.from_config(config).num_parameters()
