"""Masks without data, and what is counted of an operator."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipelines.planner.fake_process_group import SelectShare
from pipelines.planner.operator_counter import WorkCounter


@pytest.mark.parametrize(("share", "rows"), [(1.0, 12), (0.25, 3), (0.01, 1)])
def test_a_boolean_mask_selects_the_requested_share_of_rows(share, rows):
    with FakeTensorMode(), SelectShare(share):
        mask, values = torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4, 5)
        assert values[mask].shape == (rows, 5)
        assert bool(mask.all()) == (share == 1)
        assert bool(torch.stack([values.isfinite().all()]).all())


def test_logits_are_counted_until_they_are_freed():
    counter = WorkCounter(100)
    with FakeTensorMode(), counter:
        first = torch.zeros(4, 100)
        second = first + 1
        assert counter.logits == 2 * 4 * 100 * 4
        del first, second
        assert counter.logits == 0
        torch.zeros(100, 2)
        assert counter.logits == 0


def test_a_matrix_product_counts_two_operations_for_each_term():
    counter = WorkCounter()
    with FakeTensorMode(), counter:
        torch.zeros(2, 3) @ torch.zeros(3, 5)
    assert counter.flops == 2 * 2 * 3 * 5
