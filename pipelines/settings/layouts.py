"""The parallel layouts of the teacher and the student, determined and checked before any weight is loaded."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distill.parallel.layout import Layout, check_model_fits, parse_layout
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


def layout_settings(config: DistillConfig, processes: int) -> tuple[LayoutSetting, LayoutSetting, LayoutSetting]:
    """Returns the requested layouts of the teacher, of the student, and of the teacher during its own training."""
    own, text, others = config.teacher.ranks, config.teacher.layout, config.student.layout
    tuned = "auto" if own else text
    if config.machine.strategy:
        others = tuned = "replicated"  # DeepSpeed shards the model itself
    return (
        LayoutSetting("teacher", "teacher.layout", text, own or processes),
        LayoutSetting("student", "student.layout", others, processes - own),
        LayoutSetting("tuned", "teacher.layout", tuned, processes - own),
    )


def resolve_layout(wanted: LayoutSetting, model: "PretrainedConfig") -> Layout:
    """Returns the layout that a setting requests for a model; `auto` is resolved from its size and the memory.

    Raises:
        InputError: The layout is for a different number of processes, or the model doesn't support it.
    """
    layout = wanted.parsed()
    if layout is None:
        layout = parse_layout(fitting_kind(model, wanted.processes), wanted.processes, wanted.name)
    check_model_fits(layout, model, wanted.name)
    return layout


def fitting_kind(own: "PretrainedConfig", processes: int) -> str:
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

    from distill.checkpoint.pruned import auto_class_of

    with torch.device("meta"):
        built = auto or getattr(transformers, auto_class_of(config.to_dict()))
        return built.from_config(config).num_parameters()
