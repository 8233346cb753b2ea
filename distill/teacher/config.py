"""Settings of the teacher and of its fine-tuning."""

from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError


@dataclass(frozen=True)
class TeacherConfig:
    """The model to distill from.

    Args:
        model: A hub id, a local folder with config.json, safetensors and a tokenizer, or `package:NAME/FOLDER`, the
            same in an installed package.
        additional: Further teachers, checkpoints of the same kind, as JSON: '["runs/b/model"]'. Their predictions are
            averaged with the first one's; layer-wise loss terms aren't available with them.
        weights: Weight of each teacher, starting with `model`, as JSON: [2, 1]; equal if omitted.
        mix: `weighted`, by `weights` alone, or `confidence`, which for each text gives more weight to the more
            confident teachers.
        sharpness: For `confidence`: weights are multiplied by exp(-sharpness * entropy in nats).
        finetune: `auto` fine-tunes the teacher first if it has no head for the data's labels; `always` does so anyway;
            `never` stops with an error instead.
        probe: Fit a new head on frozen features before fine-tuning.
        layout: Layout on the processes: replicated, fsdp=N, hsdp=RxS, tp=N, fsdp=N,tp=M, dp=N,tp=M, pp=N, pp=N,dp=M, or
            the student's with cp; auto is replicated where training either model takes at most half of a process's
            memory, otherwise that of the fastest pair as `pipelines.plan` predicts it. N, M, R and S are numbers of
            processes, see docs/howto/distributed.md.
        offload: With FSDP, keep the teacher's weights in CPU memory.
        online: Run the teacher in every step of the training, instead of computing its signals once before.
        processes: Number of processes dedicated to the teacher, which compute the next batch's signals while the
            student trains. With 0 the teacher shares the student's processes.
    """

    model: str = ""
    additional: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    mix: Literal["weighted", "confidence"] = "weighted"
    sharpness: float = 1.0
    finetune: Literal["auto", "always", "never"] = "auto"
    probe: bool = True
    layout: str = "auto"
    offload: bool = False
    online: bool = False
    processes: int = 0

    @property
    def source(self) -> Literal["cached", "online"]:
        """Where a training's signals come from."""
        return "online" if self.online else "cached"

    def __post_init__(self) -> None:
        count = 1 + len(self.additional)
        if self.weights and (len(self.weights) != count or min(self.weights) <= 0):
            raise InputError(
                f"teacher.weights: expected {count} numbers above 0, one for each teacher, found {list(self.weights)}"
            )
        if self.sharpness < 0:
            raise InputError(f"teacher.sharpness: expected at least 0, found {self.sharpness}")
        if self.additional and (self.processes or self.online):
            raise InputError(
                f"teacher.additional: expected cached signals (teacher.online false) and no processes with {count} "
                f"teachers, found {self.source} ones and processes {self.processes}: several teachers are only queried "
                "to write a cache"
            )
        if self.processes < 0:
            raise InputError(f"teacher.processes: expected at least 0, found {self.processes}")
        if self.processes and not self.online:
            raise InputError(
                f"teacher.processes {self.processes}: expected teacher.online true, found false: cached signals are "
                "read without a teacher, whose processes would be idle"
            )
