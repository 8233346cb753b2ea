"""Which layout teacher and student get, decided and checked before a process loads a weight."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import InputError
from distill.layout import Layout, fitting_model, parse_layout
from pipelines.config import DistillConfig

SHARE = 0.5  # of a process's memory that weights and what trains them may take: activations need the rest
TRAINED_BYTES = 16  # a parameter in fp32 with its gradient and AdamW's two moments


@dataclass(frozen=True)
class Layouts:
    """How the two models of a run lie on its processes."""

    teacher: Layout
    student: Layout
    tuned: Layout  # the teacher while it is trained: on the student's processes


def layouts_of(config: DistillConfig, source: Path, processes: int) -> Layouts:
    """The layouts that the configuration names, `auto` decided by the models' sizes and this machine's memory.

    Raises:
        InputError: A layout for another number of processes, or one that the models can't take.
    """
    from transformers import AutoConfig

    from distill.student.build import student_config
    from distill.student.spec import is_relative
    from distill.teacher.load import checkpoint_folder

    teacher = AutoConfig.from_pretrained(source)
    if is_relative(config.student.spec):
        student = student_config(teacher, config.student.spec)
    else:
        student = AutoConfig.from_pretrained(checkpoint_folder(config.student.spec, "student"))
    own, text, others = config.teacher.ranks, config.teacher.layout, config.student.layout
    if own and own >= processes:
        raise InputError(
            f"teacher.ranks {own}: expected fewer than the {processes} processes, for the student needs some; start "
            "more (--devices, or torchrun)"
        )
    tuned = "auto" if own else text
    if config.machine.strategy:
        check_deepspeed(config)
        others = tuned = "replicated"  # as far as this project has a say in it
    found = Layouts(
        one(text, teacher, own or processes, "teacher.layout"),
        one(others, student, processes - own, "student.layout"),
        one(tuned, teacher, processes - own, "teacher.layout"),
    )
    check_compress(config, found.student)
    for name, offload, layout in (
        ("teacher", config.teacher.offload, found.teacher),
        ("student", config.student.offload, found.student),
    ):
        if offload and layout.fsdp == 1 and layout.zero != 2:
            raise InputError(
                f"{name}.offload: goes with weights that FSDP cuts, and {name}.layout is {layout}; use fsdp=N or zero2"
            )
    return found


def check_compress(config: DistillConfig, student: Layout) -> None:
    """Raises InputError where gradients are to be compressed that no copies of a student send."""
    if config.machine.compress != "none" and (student.sharded or student.zero == 2 or config.machine.strategy):
        raise InputError(
            f"machine.compress {config.machine.compress}: expected a student that every process has a copy of, found "
            f"{config.machine.strategy or student}, whose gradients are sent in their own way; use replicated or "
            "zero1, or leave it out"
        )


def check_deepspeed(config: DistillConfig) -> None:
    """Raises InputError where DeepSpeed can't be had, or the student has a layout as well."""
    from pipelines.deepspeed import deepspeed_settings

    deepspeed_settings(config.machine.strategy)
    if config.student.layout not in ("auto", "replicated"):
        raise InputError(
            f"machine.strategy {config.machine.strategy!r}: DeepSpeed lays the student out, and --student.layout "
            f"{config.student.layout!r} does it too; leave one of them away"
        )


def one(text: str, own: Any, processes: int, name: str) -> Layout:
    if text == "auto":
        text = fitting_kind(own, processes)
    layout = parse_layout(text, processes, name)
    fitting_model(layout, own, name)
    return layout


def fitting_kind(own: Any, processes: int) -> str:
    from pipelines.plan import parameters

    if processes == 1 or parameters(own) * TRAINED_BYTES <= SHARE * memory_of_process(processes):
        return "replicated"
    return f"fsdp={processes}"


def memory_of_process(processes: int) -> float:
    """Bytes: a GPU's, or the process's part of the machine's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / here
