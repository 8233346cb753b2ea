"""Which teacher, and whether it is trained on the task first."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TeacherConfig:
    """The model to learn from.

    Args:
        model: A hub id or a local folder with config.json, safetensors and a tokenizer.
        finetune: `auto` trains it first when it has no head for the data's labels; `always`; `never` stops instead.
        probe: Fit a new head on frozen features before fine-tuning.
    """

    model: str = ""
    finetune: Literal["auto", "always", "never"] = "auto"
    probe: bool = True
