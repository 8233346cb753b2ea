"""Tests of predictions from a sample of the data."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.data.rows.tagged import Tagged
from distill.data.sources import text_batches
from distill.data.sources.text_files import read_texts
from distill.data.splits.examples import Examples, Splits
from distill.train.config import TrainConfig
from pipelines.settings.distill_config import GeneralConfig
from pipelines.stages.prediction import (
    CHARACTERS_PER_TOKEN,
    RANDOM_BATCHES,
    measure_lengths,
    measure_total_length,
    sample_part,
    sample_splits,
    sample_text,
    shorten_training,
)

NOTHING = Examples([], None, [])


def draw_examples(count: int, seed: int = 0) -> Examples:
    lengths = np.random.default_rng(seed).integers(1, 400, count)
    return Examples(["x" * int(length) for length in lengths], None, list(range(count)))


def test_the_sample_has_the_longest_texts_and_random_ones_in_their_order():
    part = draw_examples(1000)
    sample = sample_part(part, 10, 50, 7)
    lengths = measure_lengths(part)
    assert len(sample) == 50
    assert sorted(measure_lengths(sample))[-10:] == sorted(lengths)[-10:]
    assert np.mean(sorted(measure_lengths(sample))[:40]) == pytest.approx(lengths.mean(), rel=0.25)
    assert list(sample.labels) == sorted(sample.labels)  # a text's number is its label
    assert all(sample.texts[row] == part.texts[number] for row, number in enumerate(sample.labels))


def test_a_small_split_is_its_own_sample():
    part = draw_examples(20)
    assert sample_part(part, 10, 50, 7) is part


def test_other_splits_have_the_same_share():
    splits = Splits(("a", "b", "c"), draw_examples(3400), draw_examples(1000, 1), NOTHING, draw_examples(400, 2), {})
    sample = sample_splits(splits, 10, 0)
    assert len(sample.train) == (1 + RANDOM_BATCHES) * 10
    assert (len(sample.validation), len(sample.test), len(sample.unlabelled)) == (50, 0, 20)
    assert measure_total_length(sample) < measure_total_length(splits) / 5


def test_lengths_count_the_pairs_and_the_words_of_a_tagger():
    assert measure_lengths(Examples(["ab", "c"], ["def", ""], [0, 1])).tolist() == [5, 1]
    assert measure_lengths(Tagged([["two", "words"], ["one"]], [[0, 0], [1]])).tolist() == [2, 1]


def test_plain_text_is_predicted_from_its_first_documents(tmp_path, monkeypatch):
    documents = [f"{number} " + "word " * (number % 7) for number in range(4000)]
    pq.write_table(pa.table({"body": documents}), tmp_path / "train.parquet")
    general = GeneralConfig(data=str(tmp_path), text="body", length=16, train=TrainConfig(batch_size=4))
    wanted = (1 + RANDOM_BATCHES) * 4 * 16 * CHARACTERS_PER_TOKEN
    whole = sample_text(general, tmp_path / "whole")
    taken = read_texts(str(whole.file))
    assert sum(map(len, taken)) == wanted
    assert taken[:-1] == documents[: len(taken) - 1]
    assert whole.scale == pytest.approx(sum(map(len, documents)) / wanted)
    assert whole.apply(general) == replace(general, data=str(whole.file), text=None)
    monkeypatch.setattr(text_batches, "LARGE", 1)
    streamed = sample_text(general, tmp_path / "streamed")
    assert read_texts(str(streamed.file)) == taken
    assert streamed.scale == len(documents) / len(taken)


def test_one_epoch_is_trained_at_the_same_batches_without_a_search():
    train = TrainConfig(epochs=9, batch_size=7, schedule="find", patience=3, recoveries=2, checkpointing="full")
    short = shorten_training(train)
    assert short == TrainConfig(epochs=1, batch_size=7, schedule="linear", checkpointing="full")
