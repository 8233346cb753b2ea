"""A teacher sharded across processes, each of which requests signals of its own samples."""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distill.teacher.online import TEACHER_INPUTS

Ask = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]


class SharedTeacher:
    """A sharded teacher that computes in rounds, in which every process that holds a part of the same copy takes part.

    Processes that shard the weights (`fsdp`) run the teacher at the same time, each on its own batch. Those that split
    every product or form a pipeline (`tp`, `pp`) take turns: a batch is sent to all of them, and computed once if
    several request the same one. A process without further batches calls `finish`, so that the others don't wait
    forever for its part of the weights.

    Args:
        ask: The teacher on this process: an `OnlineTeacher` of a model laid out on `mesh`, or a `PipelineForward`.
        mesh: From `mesh_of`.
    """

    def __init__(self, ask: Ask, mesh: DeviceMesh):
        self.ask = ask
        staged = mesh["pp"].size() > 1
        self.turns = mesh.get_group("pp" if staged else "tp")
        self.copy = self.turns if staged else mesh["fsdp", "tp"]._flatten("copy").get_group()
        self.row = dist.get_rank(self.copy) // dist.get_world_size(self.turns)

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Returns the teacher's outputs for a padded batch; the other processes' batches may have other sizes."""
        answer = self.round(batch)
        assert answer is not None
        return answer

    def finish(self) -> None:
        """Takes part in the other processes' rounds until every process of the copy has called it."""
        while self.round(None) is not None:
            pass

    @torch.no_grad()
    def round(self, batch: Mapping[str, Tensor] | None) -> Mapping[str, Any] | None:
        """Runs one round with at most one batch per process; returns None if no process has a batch."""
        size = dist.get_world_size(self.turns)
        # Duplicates are detected only among processes that take turns; a lone process needs no digest.
        name = None if batch is None else digest(batch) if size > 1 else "own"
        names = gathered(name, self.copy)
        if not any(names):
            return None
        rows = [names[start : start + size] for start in range(0, len(names), size)]
        answers: dict[str | None, Mapping[str, Any]] = {}
        for turn in range(size):
            if any(row[turn] is not None and row[turn] not in row[:turn] for row in rows):
                answers[rows[self.row][turn]] = self.ask(self.sent(batch, turn))
        return answers[name] if name is not None else {}

    def sent(self, batch: Mapping[str, Tensor] | None, turn: int) -> Mapping[str, Tensor]:
        """Returns the batch of the process whose turn it is, or the smallest valid batch if that process has none."""
        box = [{name: value for name, value in (batch or idle()).items() if isinstance(value, Tensor)}]
        if dist.get_world_size(self.turns) > 1:
            dist.broadcast_object_list(box, group=self.turns, group_src=turn)
        return box[0]


def idle() -> Mapping[str, Tensor]:
    return {"input_ids": torch.zeros(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 2, dtype=torch.long)}


def gathered(value: str | None, group: dist.ProcessGroup) -> list[str | None]:
    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def digest(batch: Mapping[str, Tensor]) -> str:
    """Returns a hash that two batches share if the teacher's inputs are the same in both."""
    total = blake2b(digest_size=16)
    for name in TEACHER_INPUTS:
        if name in batch:
            total.update(f"{name}:{tuple(batch[name].shape)}".encode())
            total.update(batch[name].detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
