"""Tests of batches that are limited by their tokens with padding instead of by their rows."""

import numpy as np
import pytest
import torch

from distill.data.batches.batches import TrainBatches, token_order
from distill.data.batches.encode import Encoded
from distill.data.batches.sampling import EveryRow
from distill.errors import InputError
from distill.train.config import TrainConfig

LENGTHS = np.random.default_rng(0).integers(3, 200, 500)


def encoded(lengths: np.ndarray) -> Encoded:
    return Encoded([np.full(length, 7) for length in lengths], None, np.arange(len(lengths)) % 3, 0)


@pytest.mark.parametrize("tokens", [200, 1000, 4096])
def test_no_batch_has_more_tokens_with_padding_than_the_limit(tokens):
    order = token_order(LENGTHS, tokens, seed=1, epoch=0)
    assert sorted(np.concatenate(order)) == list(range(500))
    assert max(len(rows) * LENGTHS[rows].max() for rows in order) <= tokens


def test_most_batches_are_nearly_full():
    order = token_order(LENGTHS, 4096, seed=1, epoch=0)
    assert np.mean([LENGTHS[rows].sum() for rows in order]) > 0.8 * 4096


def test_short_texts_are_padded_little():
    lengths = np.random.default_rng(1).integers(4, 40, 2000)
    order = token_order(lengths, 1024, seed=1, epoch=0)
    padded = sum(len(rows) * lengths[rows].max() for rows in order)
    assert padded < 1.06 * lengths.sum()


def test_a_row_longer_than_the_limit_is_a_batch_of_its_own():
    order = token_order(np.array([500, 4, 4, 900]), 64, seed=0, epoch=0)
    assert sorted(tuple(sorted(rows)) for rows in order) == [(0,), (1, 2), (3,)]


def test_epochs_have_as_many_batches_and_other_rows_in_them():
    orders = [token_order(LENGTHS, 1000, seed=1, epoch=epoch) for epoch in range(5)]
    batches = TrainBatches(encoded(LENGTHS), 8, 0, batch_tokens=1000, seed=1)
    assert {len(order) for order in orders} == {len(batches)}
    assert all(np.array_equal(a, b) for a, b in zip(orders[2], token_order(LENGTHS, 1000, 1, 2), strict=True))
    first, second = ({frozenset(rows.tolist()) for rows in order} for order in orders[:2])
    assert len(first & second) < 0.3 * len(first)


def test_every_sample_has_the_same_weight_in_an_epoch():
    """A batch's loss is a mean over its rows, multiplied by its share."""
    weights = np.zeros(500)
    batches = TrainBatches(encoded(LENGTHS), 8, 0, batch_tokens=1000, seed=1)
    for rows in batches.order_rows(0):
        batch = batches.build_batch((rows, 0, 0))
        assert set(batch["shares"]) == {"rows", "labels", "tokens"}
        weights[rows] += batch["shares"]["rows"] / len(rows)
    assert weights == pytest.approx(len(batches) / 500)


def test_the_shares_of_two_processes_add_up_to_the_weight_of_one():
    one, *two = (
        TrainBatches(encoded(LENGTHS), 8, 0, batch_tokens=1000, seed=1, rank=rank, ranks=ranks)
        for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
    for rows in one.order_rows(0)[:20]:
        whole = one.build_batch((rows, 0, 0))["shares"]
        parts = [each.build_batch((rows, 0, 0))["shares"] for each in two]
        for name, share in whole.items():
            assert (parts[0][name] + parts[1][name]) / 2 == pytest.approx(share)


def test_an_interrupted_epoch_goes_on_with_the_next_batch():
    whole = list(TrainBatches(encoded(LENGTHS), 8, 0, batch_tokens=2000, seed=3))
    resumed = TrainBatches(encoded(LENGTHS), 8, 0, batch_tokens=2000, seed=3)
    resumed.load_state_dict({"position": 5})
    rest = list(resumed)
    assert len(rest) == len(whole) - 5
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(rest, whole[5:], strict=True))


def test_rows_alone_have_no_weights():
    assert "shares" not in next(iter(TrainBatches(encoded(LENGTHS), 8, 0, seed=1)))


@pytest.mark.parametrize("tokens", [100, 2000])
def test_a_sampler_makes_batches_of_rows_that_hold_every_row_in_every_epoch(tokens):
    begun: list[int] = []
    batches = TrainBatches(
        encoded(LENGTHS), 16, 0, batch_tokens=tokens, seed=1, threads=0, sampler=EveryRow(500, begun.append)
    )
    assert len(batches) == 32
    for epoch in range(3):
        trained = list(batches)
        assert sum(len(batch["labels"]) for batch in trained) == 500
        assert not any("shares" in batch for batch in trained), "every batch has the same weight"
        assert begun == list(range(epoch + 1))


def test_a_scaled_rate_is_rejected_with_batches_of_tokens():
    with pytest.raises(InputError, match="train.rate_scaling: expected none with batch_tokens, found sqrt"):
        TrainConfig(batch_tokens=1000, rate_scaling="sqrt")
