"""Which teacher, and whether it is trained on the task first."""

from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError


@dataclass(frozen=True)
class TeacherConfig:
    """The model to learn from.

    Args:
        model: A hub id or a local folder with config.json, safetensors and a tokenizer.
        finetune: `auto` trains it first when it has no head for the data's labels; `always`; `never` stops instead.
        probe: Fit a new head on frozen features before fine-tuning.
        layout: How it lies on the processes: replicated, fsdp=N, hsdp=RxS, tp=N, fsdp=N,tp=M; auto is replicated where
            it fits into each process's memory, else fsdp.
        offload: FSDP keeps its weights in the CPU's memory.
        signals: `cached` writes them once and trains without the teacher; `online` asks it in every step.
        ranks: Processes, of those there are, that hold the teacher and nothing else: they answer about a batch while
            the student trains on the one before. 0 lays it out on the student's.
    """

    model: str = ""
    finetune: Literal["auto", "always", "never"] = "auto"
    probe: bool = True
    layout: str = "auto"
    offload: bool = False
    signals: Literal["cached", "online"] = "cached"
    ranks: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 0:
            raise InputError(f"teacher.ranks: expected at least 0, found {self.ranks}")
        if self.ranks and self.signals != "online":
            raise InputError(
                f"teacher.ranks {self.ranks}: cached signals are read without a teacher, whose processes would stand "
                "idle; add --teacher.signals online, or leave ranks at 0"
            )
