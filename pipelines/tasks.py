"""What a run is about, and what its task leaves out."""

from pathlib import Path

from distill.errors import InputError
from pipelines.config import DistillConfig


def task_for(config: DistillConfig, source: Path) -> tuple[str, str]:
    """(name in TASKS, why) for the teacher at `source` and the data."""
    from transformers import AutoConfig

    from distill.tasks.choose import choose

    return choose(config.task, AutoConfig.from_pretrained(source), config.teacher.model, config.data)


def check_task_fits(config: DistillConfig, task: str) -> None:
    """
    Raises:
        InputError: Something is asked for that is there for one class a text alone.
    """
    if task == "text-classification":
        return
    for name, asked in (
        ("budget", config.budget.asked),
        ("quantize.scheme", bool(config.quantize.scheme)),
        ("teacher.also", bool(config.teacher.also)),
    ):
        if asked:
            raise InputError(
                f"{name}: expected text-classification with one class a text, found {task}: students of other tasks "
                "are distilled, exported and measured, and not yet pruned, quantized or taught by several"
            )
