"""Entries of a batch that are no tensors."""

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from distill.losses.teacher_signals import TeacherSignals


def find_shares(batch: Mapping[str, Tensor]) -> Mapping[str, float] | None:
    """Returns the `shares` of `distill.data.batches.sharding.shard_batch`; None if the batch is not sharded."""
    return cast(Mapping[str, float] | None, batch.get("shares"))


def find_signals(batch: Mapping[str, Tensor]) -> TeacherSignals | None:
    """Returns the `signals` that a data module has added to the batch; None if there are none."""
    return cast(TeacherSignals | None, batch.get("signals"))
