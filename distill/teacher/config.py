"""Which teacher, and whether it is trained on the task first."""

from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError


@dataclass(frozen=True)
class TeacherConfig:
    """The model to learn from.

    Args:
        model: A hub id or a local folder with config.json, safetensors and a tokenizer.
        also: Further models, checkpoints like it, whose answers are mixed with its own; layers are learnt from none.
        weights: How much each model counts, the first one's first; equally where left out.
        mix: `weighted`, or `confidence`: in each text the surer ones count more.
        sharpness: Of `confidence`: how much more, a nat of entropy.
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
    also: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    mix: Literal["weighted", "confidence"] = "weighted"
    sharpness: float = 1.0
    finetune: Literal["auto", "always", "never"] = "auto"
    probe: bool = True
    layout: str = "auto"
    offload: bool = False
    signals: Literal["cached", "online"] = "cached"
    ranks: int = 0

    def __post_init__(self) -> None:
        count = 1 + len(self.also)
        if self.weights and (len(self.weights) != count or min(self.weights) <= 0):
            raise InputError(
                f"teacher.weights: expected {count} numbers above 0, one for each teacher, found {list(self.weights)}"
            )
        if self.sharpness < 0:
            raise InputError(f"teacher.sharpness: expected at least 0, found {self.sharpness}")
        if self.also and (self.ranks or self.signals == "online"):
            raise InputError(
                f"teacher.also: {count} teachers are asked once, and cached; leave --teacher.signals and ranks alone"
            )
        if self.ranks < 0:
            raise InputError(f"teacher.ranks: expected at least 0, found {self.ranks}")
        if self.ranks and self.signals != "online":
            raise InputError(
                f"teacher.ranks {self.ranks}: cached signals are read without a teacher, whose processes would stand "
                "idle; add --teacher.signals online, or leave ranks at 0"
            )
