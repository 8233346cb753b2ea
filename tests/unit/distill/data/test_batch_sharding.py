"""Tests the share of a batch that each of several processes gets."""

import itertools

import numpy as np
import pytest
import torch

from distill.data.batches.batches import EvalBatches, TrainBatches
from distill.data.batches.encode import Encoded
from distill.data.batches.sharding import divide_rows, shard_batch
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.compose import compute_loss_terms, scale_by_share
from distill.losses.config import LossConfig
from distill.losses.logits import IGNORED


def numbered_rows(lengths: list[int], labels: list[int] | None = None) -> Encoded:
    """Returns rows of the given lengths; row i consists of i + 1, repeated."""
    ids = [np.full(n, i + 1, np.int64) for i, n in enumerate(lengths)]
    return Encoded(ids, None, np.asarray(labels or range(len(lengths))), 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_all_processes_together_get_the_rows_of_one_process(ranks: int):
    data = numbered_rows([1 + i % 9 for i in range(43)])
    whole = TrainBatches(data, 6, 0, seed=2)
    parts = [TrainBatches(data, 6, 0, seed=2, rank=rank, ranks=ranks) for rank in range(ranks)]
    for _ in range(2):
        for expected, *shares in zip(whole, *parts, strict=True):
            rows = [row for share in shares for row in share["labels"].tolist() if row != IGNORED]
            assert sorted(rows) == sorted(expected["labels"].tolist())
            assert max(share["input_ids"].shape[1] for share in shares) == expected["input_ids"].shape[1]


def cost(lengths: np.ndarray, rows: np.ndarray, speed: float = 1.0) -> float:
    return len(rows) * lengths[rows].max(initial=0) / speed


def test_rows_are_divided_by_the_tokens_that_they_cost():
    lengths = np.array([40, 3, 4, 5, 38, 6, 4, 5])
    first, second = divide_rows(lengths, [1, 1])
    assert first.tolist() == [1, 2, 3, 5, 6, 7]
    assert second.tolist() == [0, 4]


@pytest.mark.parametrize("speeds", [[1, 1], [1, 2], [3, 1], [1, 1, 1], [1, 2, 4]])
def test_no_other_division_of_sorted_rows_is_done_earlier(speeds):
    """All divisions are tried."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 50, rng.integers(1, 9))
        order, count = np.argsort(lengths, kind="stable"), len(lengths)
        parts = divide_rows(lengths, speeds)
        slowest = max(cost(lengths, part, speed) for part, speed in zip(parts, speeds, strict=True))
        assert sorted(np.concatenate(parts).tolist()) == list(range(count))
        cuts = itertools.combinations_with_replacement(range(count + 1), len(speeds) - 1)
        best = min(
            max(
                cost(lengths, order[start:stop], speed)
                for start, stop, speed in zip([0, *cut], [*cut, count], speeds, strict=True)
            )
            for cut in cuts
        )
        assert slowest == pytest.approx(best)


def test_equal_rows_are_divided_equally_or_by_speed():
    assert [len(part) for part in divide_rows(np.full(9, 7), [1, 1])] == [5, 4]
    assert [len(part) for part in divide_rows(np.full(9, 7), [1, 2])] == [3, 6]


def test_no_row_is_lost_to_rounding():
    rng = np.random.default_rng(0)
    for _ in range(500):
        lengths, speeds = rng.integers(1, 50, rng.integers(1, 4)), rng.uniform(0.1, 10, 3)
        assert sum(map(len, divide_rows(lengths, list(speeds)))) == len(lengths)


def test_several_labels_of_a_text_are_not_cut_where_they_are_as_many_as_its_tokens():
    lengths = [6, 2, 3, 2]
    ids = [np.full(n, 1, np.int64) for n in lengths]
    batch = Encoded(ids, None, np.ones((4, 6), np.float32), 0).collate(range(4), 0)
    shards = [shard_batch(batch, rank, 2) for rank in range(2)]
    assert sorted(shard["input_ids"].shape[1] for shard in shards) == [3, 6]
    assert {shard["labels"].shape[1] for shard in shards} == {6}


def test_a_share_is_padded_to_its_own_longest_row():
    batch = numbered_rows([9, 2, 2, 3]).collate(range(4), 0)
    first, second = (shard_batch(batch, rank, 2) for rank in range(2))
    assert first["input_ids"].shape == (3, 3)
    assert second["input_ids"].shape == (1, 9)
    assert first["attention_mask"].sum(1).tolist() == [2, 2, 3]


def test_evaluation_on_several_processes_counts_every_row_once():
    labels = [
        row
        for rank in range(4)
        for batch in EvalBatches(numbered_rows([3] * 10), 3, 0, rank=rank, ranks=4)
        for row in batch["labels"].tolist()
        if row != IGNORED
    ]
    assert sorted(labels) == list(range(10))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("divergence", ["forward_kl", "decoupled_kl"])  # the second is a mean over the labels
def test_losses_of_the_shares_average_to_the_loss_of_the_whole_batch(divergence: str, ranks: int):
    generator = torch.Generator().manual_seed(0)
    labels = [0, IGNORED, 2, 1, IGNORED]
    batch = dict(numbered_rows([4, 1, 3, 7, 2], labels).collate(range(5), 0))
    batch["student"] = torch.randn(5, 3, generator=generator)
    batch["teacher"] = torch.randn(5, 3, generator=generator)
    batch["states"] = torch.randn(2, 5, 7, 4, generator=generator).transpose(0, 1)
    batch["scores"] = torch.randn(2, 5, 3, 7, 7, generator=generator).transpose(0, 1)
    config = LossConfig(kl=1, ce=1, hidden=1, attention=1, relations=1, relation_heads=2, divergence=divergence)

    def terms(part: dict) -> dict[str, torch.Tensor]:
        length = part["attention_mask"].shape[1]
        states, scores = part["states"][:, :, :length], part["scores"][..., :length, :length]
        vectors = [(states[:, 0], states[:, 1])]
        pairs = {"hidden": vectors, "relations": vectors, "attention": [(scores[:, 0], scores[:, 1])]}
        logits = {"logits": part["teacher"]}
        return compute_loss_terms(config, part["student"], part["labels"], part["attention_mask"], logits, pairs)

    parts = [shard_batch(batch, rank, ranks) for rank in range(ranks)]
    found = [scale_by_share(config, terms(part), part["shares"]) for part in parts]
    whole = terms(batch)
    assert list(whole) == ["kl", "ce", "hidden", "attention", "relations"]
    for name, expected in whole.items():
        torch.testing.assert_close(torch.stack([each[name] for each in found]).mean(), expected)


def test_shares_of_a_language_model_are_weighted_by_tokens():
    blocks = LanguageBlocks([np.arange(1, n + 1) for n in (5, 2, 3)])
    first, second = (shard_batch(blocks.collate(range(3), 0), rank, 2) for rank in range(2))
    assert first["shares"] == {"rows": 2 * 5 / 10, "labels": 2 * 3 / 7, "tokens": 2 * 5 / 10}
    assert second["shares"] == {"rows": 2 * 5 / 10, "labels": 2 * 4 / 7, "tokens": 2 * 5 / 10}


def test_a_process_without_rows_has_no_weight():
    spare = shard_batch(numbered_rows([3, 2]).collate([0, 1], 0), 2, 3)
    assert spare["shares"] == {"rows": 0, "labels": 0, "tokens": 0}
    assert spare["labels"].tolist() == [IGNORED]
    assert len(spare["input_ids"]) == 1


def test_the_share_of_a_single_process_has_no_additional_fields():
    batch = numbered_rows([3, 2]).collate([0, 1], 0)
    assert shard_batch(batch, 0, 1).keys() == batch.keys()
