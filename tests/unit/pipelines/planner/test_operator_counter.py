"""What single operators read and write, against arithmetic."""

import pytest
import torch
from torch.nn import functional

from pipelines.planner.operator_counter import WorkCounter

VALUES = torch.ones(4, 8)  # 128 bytes
TABLE, IDS = torch.ones(1000, 8), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("operator", "bytes_accessed"),
    [
        (lambda: VALUES + VALUES, 3 * 128),
        (lambda: VALUES.add_(0.0), 2 * 128),
        (lambda: VALUES.sum(), 128 + 4),
        (lambda: VALUES + torch.ones(8).expand(4, 8), 2 * 32 + 2 * 128),  # the row is written once, and read once
        (lambda: VALUES.view(8, 4).transpose(0, 1), 0),
        (lambda: torch.ops.aten._unsafe_view(VALUES, [32]), 0),
        (lambda: torch.empty(4, 8), 0),
        (lambda: functional.embedding(IDS, TABLE), 24 + 2 * 96),  # only the rows that are looked up
        (lambda: VALUES @ VALUES.T, 0),  # a product, which counts by its work
    ],
)
def test_the_bytes_that_an_operator_reads_and_writes_are_counted(operator, bytes_accessed):
    with WorkCounter() as counter:
        operator()
    assert counter.bytes_accessed == bytes_accessed


def test_dropout_draws_a_number_for_each_value():
    with WorkCounter() as counter:
        functional.dropout(VALUES, 0.5)
    assert counter.drawn == 32
    assert counter.bytes_accessed == 2 * 128 + 3 * 128, "the mask is scaled in place, then values are multiplied by it"


def test_matrix_products_are_counted_in_flops():
    with WorkCounter() as counter:
        _ = VALUES @ VALUES.T
    assert counter.flops == 2 * 4 * 8 * 4
