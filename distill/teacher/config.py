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
        layout: How it lies on the processes: replicated, fsdp=N, hsdp=RxS, tp=N, fsdp=N,tp=M; auto is replicated where
            it fits into each process's memory, else fsdp.
        signals: `cached` writes them once and trains without the teacher; `online` asks it in every step.
    """

    model: str = ""
    finetune: Literal["auto", "always", "never"] = "auto"
    probe: bool = True
    layout: str = "auto"
    signals: Literal["cached", "online"] = "cached"
