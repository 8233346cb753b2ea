"""The settings of a task that follow from those of a run."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distill.data.config import DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.rows.chat_config import ChatConfig
from distill.errors import InputError
from distill.tasks.names import LANGUAGE_TASKS

if TYPE_CHECKING:
    from pipelines.settings.commands.distill import DistillConfig

STORED_FORM = ("dtype", "compression")  # settings of keep that have an effect for every task


def task_arguments(
    task: str, data: DataConfig, masking: MaskConfig, chat: ChatConfig, *, generates: bool = False
) -> dict[str, Any]:
    """Returns the settings that the class of this task in TASKS is built with, see `Task.build`.

    `generates` is set if the student generates text during training.

    Raises:
        InputError: The task doesn't support the packing, or packed rows would contain several prompts for a student
            that generates text.
    """
    if task not in LANGUAGE_TASKS:
        return {}
    default = "stream" if task != "chat" else "none" if generates else "documents"
    packing = default if data.packing == "auto" else data.packing
    if packing == "stream" and task == "chat":
        raise InputError(
            "data.packing: expected documents or none for conversations, found stream: conversations aren't split"
        )
    if packing == "documents" and generates:
        raise InputError(
            "data.packing: expected stream or none with on_policy, found documents: a packed row has several prompts"
        )
    if task == "causal-lm":
        return {"packing": packing}
    if task == "masked-lm":
        return {"masking": asdict(masking)} | ({"packing": packing} if packing != "stream" else {})
    from distill.data.rows.chat_template import read_template_file

    template = {"template": read_template_file(chat.template)} if chat.template else {}
    return {"packing": packing, "chat": asdict(chat)} | template


def run_task_arguments(settings: "DistillConfig", task: str) -> dict[str, Any]:
    """Returns `task_arguments` for the settings of a run."""
    return task_arguments(task, settings.data, settings.masking, settings.chat, generates=settings.on_policy.share > 0)
