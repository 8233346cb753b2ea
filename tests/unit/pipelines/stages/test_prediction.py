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
from pipelines.runs.cli import parse
from pipelines.runs.console import CALLS
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig, GeneralConfig
from pipelines.settings.plan import RunPlan
from pipelines.stages.prediction import (
    CHARACTERS_PER_TOKEN,
    RANDOM_BATCHES,
    SampledRun,
    SampleSizes,
    count_epochs,
    count_rounds,
    measure_scale,
    sample_part,
    sample_splits,
    sample_text,
    shorten_plan,
    shorten_training,
)
from pipelines.stages.prepare.compared_texts import measure_lengths
from pipelines.stages.prune.budget_timing import LEAST_ROUNDS

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
    sample = sample_splits(splits, SampleSizes(batch=10, train=170, others=20), 0)
    assert (len(sample.train), len(sample.validation), len(sample.test), len(sample.unlabelled)) == (170, 50, 0, 20)
    longest = measure_scale(splits, sample, "train")
    assert 10 < longest < 3800 / 190  # the sample's texts are longer than those of the data
    assert measure_scale(splits, splits, "train") == 1
    assert len(sample_splits(splits, SampleSizes(batch=10, train=170, others=300), 0).validation) == 300


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


WORDS = ("--teacher", "T", "--data", "D", "--output", "O")


def read_settings(*arguments):
    return parse(DistillConfig, [*WORDS, *arguments], prog="", about="", examples="", short=SHORT_OPTIONS)


def test_the_sample_has_all_rows_that_scores_calibration_and_comparisons_need():
    plain = SampleSizes.read(read_settings("--batch_size", "8", "--until", "distill"))
    assert (plain.batch, plain.train, plain.others) == (16, (1 + RANDOM_BATCHES) * 16, 32)  # the teacher's batch
    pruned = SampleSizes.read(read_settings("--batch_size", "8", "--speedup", "4"))
    assert (pruned.train, pruned.others) == (512, 256)


def test_doubtful_labels_are_not_predicted_from_the_few_rows_of_a_sample():
    settings = read_settings("--data.clean", "standard,near-duplicates=0.8,labels=drop", "--data.clean.deploy", "html")
    plan = RunPlan(settings, "", None, (), None, None, None, None, None)
    short = shorten_plan(plan).settings.clean
    assert short.find_steps() == tuple(step for step in settings.clean.find_steps() if step.name != "labels")
    assert short.find_deployed() == settings.clean.find_deployed()


@pytest.mark.parametrize(
    ("schedule", "epochs"),
    [
        ("oneshot", {"distill-4x": 10}),
        ("iterative", {"distill-4x-round1": 3, "distill-4x-round2": 3, "distill-4x": 4}),
        ("gradual", {"mask-4x": 3, "distill-4x": 7}),
    ],
)
def test_epochs_are_counted_for_every_stage_that_trains_a_pruned_student(schedule, epochs):
    settings = read_settings("--speedup", "4", "--epochs", "10", "--prune.schedule", schedule)
    assert {name: count for name, count in count_epochs(settings).items() if "-4x" in name} == epochs


@pytest.mark.parametrize(
    ("stage", "measurements", "seconds", "rounds"),
    [("shape-4x", 4, 36, 60), ("shape-4x", 4, 72, 30), ("costs", 1, 36, LEAST_ROUNDS), ("costs", 2, 6, 20)],
    ids=["short texts", "longer texts", "long texts", "two lengths"],
)
def test_timing_is_predicted_with_as_many_rounds_as_fit(stage, measurements, seconds, rounds, tmp_path):
    settings = read_settings("--speedup", "4")
    short = replace(settings, budget=replace(settings.budget, rounds=3))
    run = SampledRun(tmp_path / "run", settings, short)
    run.console.spent[CALLS], run.console.blocks[CALLS] = seconds, measurements
    assert run._scale(stage, CALLS, {}) == pytest.approx(rounds / count_rounds(short, stage))
