"""Pipeline stages traced one by one, against the whole model."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from distill.parallel.layout import Layout
from distill.parallel.pipeline_stage import split_layers
from distill.train.config import TrainConfig
from pipelines.planner import stage_trace
from pipelines.planner.fake_process_group import simulate_world
from pipelines.planner.stage_trace import (
    count_micro_batches,
    extrapolate_stage,
    list_extreme_stages,
    trace_stage,
    trace_stages,
)
from pipelines.planner.trace import Query, Training, build_on_meta, trace_step

CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, num_hidden_layers=8, num_attention_heads=4, intermediate_size=256, use_cache=False
)
ROWS, LENGTH = 2, 64


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(CONFIG)


def divide(stages: int) -> list[range]:
    return split_layers(build_on_meta(build), stages)


def build_fake_batch() -> dict[str, torch.Tensor]:
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def build_classified_batch() -> dict[str, torch.Tensor]:
    return build_fake_batch() | {"labels": torch.zeros(ROWS, dtype=torch.long)}


@pytest.mark.parametrize(("rows", "found"), [(8, (4, 2)), (3, (3, 1)), (9, (3, 3))])
def test_batches_are_split_as_the_pipeline_splits_them(rows, found):
    assert count_micro_batches(rows) == found


def test_two_stages_share_the_work_and_the_states():
    whole_batch = Training(build, lambda: {name: value.repeat(4, 1) for name, value in build_fake_batch().items()})
    with simulate_world(1):
        whole = trace_step(whole_batch, Layout())
    with simulate_world(2):
        first, last = (extrapolate_stage(Training(build, build_fake_batch), divide(2), 4, index) for index in (0, 1))
    assert first.work.flops + last.work.flops == pytest.approx(whole.work.flops, rel=0.01)
    assert first.held_bytes + last.held_bytes == pytest.approx(whole.held_bytes, rel=0.02)


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages():
    with simulate_world(4):
        one, several = (
            extrapolate_stage(Training(build, build_fake_batch), divide(4), count, 0).memory["activations"]
            for count in (1, 8)
        )
    assert several == pytest.approx(4 * one, rel=0.2)  # one of them is in its backward pass


def test_stages_wait_for_the_ends_of_the_pipeline_and_send_hidden_states():
    with simulate_world(4):
        found = trace_stages(Training(build, build_fake_batch), Layout(pp=4), 4)
    assert found.stretch == pytest.approx(7 / 4)
    ((collective, sent),) = found.sent.items()
    assert collective.waits
    assert sent == 2 * 4 * ROWS * LENGTH * CONFIG.hidden_size * 4


@pytest.mark.parametrize(
    ("layers", "expected"),
    [((4, 4), [0, 1]), ((3, 2, 3), [0, 2]), ((1, 4, 4, 3), [1, 3, 0]), ((2, 2, 3, 1), [2, 0, 3]), ((8,), [0])],
)
def test_the_largest_stage_is_among_those_traced_which_begin_with_the_most_layers(layers, expected):
    starts = [sum(layers[:number]) for number in range(len(layers))]
    parts = [range(start, start + count) for start, count in zip(starts, layers, strict=True)]
    assert list_extreme_stages(parts) == expected


@pytest.mark.slow
def test_a_stage_between_the_ends_counts_where_the_first_has_little_but_embeddings():
    config = BertConfig(
        vocab_size=1024, hidden_size=64, num_hidden_layers=9, num_attention_heads=4, intermediate_size=256
    )

    def build_classifier() -> BertForSequenceClassification:
        return BertForSequenceClassification(config)

    work, layout = Training(build_classifier, build_classified_batch), Layout(pp=4)
    parts = split_layers(build_on_meta(build_classifier), 4)
    assert max(range(4), key=lambda index: len(parts[index])) not in (0, 3)
    with simulate_world(4):
        every = [extrapolate_stage(work, parts, 4, index) for index in range(4)]
        found = trace_stages(work, layout, 4)
    assert found.peak == max(each.peak for each in every) > max(every[0].peak, every[3].peak)
    assert found.work.flops == max(each.work.flops for each in every)
    layers = [len(part) for part in parts]
    assert found.stretch == pytest.approx(1 + (9 - max(layers)) / max(layers) / 4), "a batch passes the others once"


@pytest.mark.slow
def test_a_frozen_stage_draws_no_dropout():
    def build_classifier() -> BertForSequenceClassification:
        return BertForSequenceClassification(BertConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4))

    with simulate_world(2):
        assert trace_stages(Query(build_classifier, build_fake_batch), Layout(pp=2), 4).work.drawn == 0
        training = Training(build_classifier, build_classified_batch, backend="gloo")
        assert trace_stages(training, Layout(pp=2), 4).work.drawn > 0


@pytest.mark.slow
def test_no_stage_is_traced_after_one_that_does_not_fit(monkeypatch):
    traced, trace = [], stage_trace.extrapolate_stage

    def extrapolate(work, parts, micro_batches, index):
        traced.append(index)
        return trace(work, parts, micro_batches, index)

    monkeypatch.setattr(stage_trace, "extrapolate_stage", extrapolate)
    work, layout = Training(build, build_fake_batch), Layout(pp=2)
    with simulate_world(2):
        large = trace_stages(work, layout, 4).peak
        assert trace_stages(work, layout, 4, large).peak == large
        assert traced == [0, 1, 0, 1]
        traced.clear()
        first = trace_stages(work, layout, 4, 1.0)
    assert traced == [0]
    assert 1.0 < first.peak <= large


@pytest.mark.slow
def test_checkpointed_and_frozen_stages_hold_less_than_trained_ones():
    with simulate_world(2):
        plain, full = (
            trace_stages(Training(build, build_fake_batch, train=TrainConfig(checkpointing=mode)), Layout(pp=2), 4)
            for mode in ("none", "full")
        )
        frozen = trace_stages(Query(build, build_fake_batch), Layout(pp=2), 4)
    assert full.memory["activations"] < plain.memory["activations"] / 2
    assert full.work.flops > 1.2 * plain.work.flops
    assert frozen.held_bytes == pytest.approx(plain.held_bytes / 3, rel=0.05)
    assert frozen.work.flops == pytest.approx(plain.work.flops / 3, rel=0.1)


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_an_extrapolated_stage_equals_its_full_trace(index, checkpointing):
    training = Training(build, build_fake_batch, train=TrainConfig(checkpointing=checkpointing))
    with simulate_world(2):
        extrapolated = extrapolate_stage(training, divide(2), 4, index)
        traced = trace_stage(training, divide(2), 4, index, 4)
    assert extrapolated.held_bytes == traced.held_bytes
    assert extrapolated.work.flops == pytest.approx(traced.work.flops, rel=1e-6)
    assert extrapolated.peak == pytest.approx(traced.peak, rel=0.03)
