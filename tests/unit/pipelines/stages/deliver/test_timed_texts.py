"""Tests the texts that models are timed on: their lengths are those of the whole split."""

import numpy as np
import pytest

from pipelines.stages.deliver.timed_texts import RowBlocks, repeat_tokens

LENGTHS = np.random.default_rng(0).lognormal(2.4, 0.5, 3000).astype(int)


def test_every_block_has_the_lengths_of_the_split():
    blocks = RowBlocks.cut(LENGTHS, 16, seed=3)
    median = np.median(LENGTHS)
    drawn = [np.median(LENGTHS[blocks.draw(number)]) for number in range(20)]
    at_random = [np.median(np.random.default_rng(number).choice(LENGTHS, 16)) for number in range(20)]
    assert np.abs(np.array(drawn) / median - 1).max() < 0.1
    assert np.std(drawn) < np.std(at_random) / 2


def test_blocks_have_different_rows_until_the_split_is_used_up():
    blocks = RowBlocks.cut(LENGTHS[:64], 16, seed=0)
    rows = np.concatenate([blocks.draw(number) for number in range(4)])
    assert sorted(rows) == list(range(64))
    assert sorted(blocks.draw(4)) == sorted(blocks.draw(0))


def test_the_seed_decides_the_rows():
    first, again, other = (RowBlocks.cut(LENGTHS, 8, seed).draw(1).tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("count", [1, 3])
def test_a_split_with_few_rows_repeats_them_evenly(count):
    rows = RowBlocks.cut(LENGTHS[:count], 6, seed=0).draw(0)
    assert np.bincount(rows).tolist() == [6 // count] * count


@pytest.mark.parametrize("length", [2, 5, 11])
def test_texts_are_repeated_or_cut_to_a_length(length):
    inputs = {"input_ids": np.array([[1, 2, 3, 4, 5]]), "attention_mask": np.ones((1, 5), np.int64)}
    repeated = repeat_tokens(inputs, length)
    assert repeated["input_ids"].tolist() == [[1 + position % 5 for position in range(length)]]
    assert repeated["attention_mask"].shape == (1, length)
