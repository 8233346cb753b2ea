"""Tests of the memory that a training leaves behind."""

import gc
from weakref import ref

import torch
from torch import nn

from pipelines.runs import trainer


class SelfReferencing(nn.Module):
    """A module that refers to itself, as Lightning's do."""

    def __init__(self, numbers: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers))
        self.cycle = [self]


def test_earlier_trainings_are_freed_before_one_with_many_weights():
    gc.disable()
    try:
        earlier = SelfReferencing(10)
        reference = ref(earlier)
        del earlier
        trainer.free_earlier_trainings(SelfReferencing(10))  # type: ignore[arg-type]
        assert reference() is not None
        trainer.free_earlier_trainings(SelfReferencing(trainer._COLLECTED_FROM // 4))  # type: ignore[arg-type]
        assert reference() is None
    finally:
        gc.enable()
