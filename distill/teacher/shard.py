"""A teacher sharded across processes, each of which requests signals of its own samples."""

from collections.abc import Mapping
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distill.losses.teacher_signals import SignalSource, TeacherSignals
from distill.models.inputs import OUTPUT_FIELDS


class ShardedTeacher:
    """A sharded teacher that computes in rounds, in which every process with a part of the same copy takes part.

    Processes that shard the weights (`fsdp`) run the teacher at the same time, each on its own batch. Those that split
    every product or form a pipeline (`tp`, `pp`) take turns: a batch is sent to all of them, and computed once if
    several request the same one. A process without further batches calls `finish`, so that the others don't wait
    forever for its part of the weights. Processes with segments of the same rows (`cp`) request them in one round.

    Args:
        local: The teacher on this process: an `OnlineTeacher` of a model laid out on `mesh`, or a `PipelineForward`.
        mesh: From `build_mesh`.
    """

    def __init__(self, local: SignalSource, mesh: DeviceMesh):
        self.local = local
        is_pipeline = mesh["pp"].size() > 1
        self.turn_group = mesh.get_group("pp" if is_pipeline else "tp")
        self.copy_group = self.turn_group if is_pipeline else mesh["fsdp", "cp", "tp"]._flatten("copy").get_group()
        self.turn_row = dist.get_rank(self.copy_group) // dist.get_world_size(self.turn_group)

    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        """Returns the teacher's outputs for a padded batch; the other processes' batches may have other sizes."""
        return self._run_round(batch) or TeacherSignals()

    def finish(self) -> None:
        """Takes part in the other processes' rounds until every process of the copy has called it."""
        while self._run_round(None) is not None:
            pass

    @torch.no_grad()
    def _run_round(self, batch: Mapping[str, Tensor] | None) -> TeacherSignals | None:
        """Runs one round with at most one batch per process; returns None if no process has a batch."""
        turns = dist.get_world_size(self.turn_group)
        # Duplicates are detected only among processes that take turns; a lone process needs no digest.
        digest = None if batch is None else _hash_batch(batch) if turns > 1 else "own"
        digests = _gather_values(digest, self.copy_group)
        if not any(digests):
            return None
        rows = [digests[start : start + turns] for start in range(0, len(digests), turns)]
        signals: dict[str | None, TeacherSignals] = {}
        for turn in range(turns):
            if any(row[turn] is not None and row[turn] not in row[:turn] for row in rows):
                signals[rows[self.turn_row][turn]] = self.local(self._broadcast_batch(batch, turn))
        return signals[digest] if digest is not None else TeacherSignals()

    def _broadcast_batch(self, batch: Mapping[str, Tensor] | None, turn: int) -> Mapping[str, Tensor]:
        """Returns the batch of the process whose turn it is, or the smallest valid batch if that process has none."""
        box = [{name: value for name, value in (batch or _smallest_batch()).items() if isinstance(value, Tensor)}]
        if dist.get_world_size(self.turn_group) > 1:
            dist.broadcast_object_list(box, group=self.turn_group, group_src=turn)
        return box[0]


def _smallest_batch() -> Mapping[str, Tensor]:
    return {"input_ids": torch.zeros(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 2, dtype=torch.long)}


def _gather_values(value: str | None, group: dist.ProcessGroup) -> list[str | None]:
    values: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _hash_batch(batch: Mapping[str, Tensor]) -> str:
    """Returns a hash that two batches share if the teacher's inputs are the same in both."""
    digest = blake2b(digest_size=16)
    for name in OUTPUT_FIELDS:
        if name in batch:
            digest.update(f"{name}:{tuple(batch[name].shape)}".encode())
            digest.update(batch[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
