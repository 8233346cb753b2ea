"""Tests how often models are timed under a budget."""

from pathlib import Path

import numpy as np
import pytest

from compress.export.common.targets import ExportTarget
from compress.measure import latency
from compress.prune.budget import Budget
from distill.data.splits.examples import Examples
from distill.tasks.language import CausalLM
from pipelines.runs.console import Console
from pipelines.stages.prune import budget_timing
from pipelines.stages.prune.budget_timing import (
    LEAST_ROUNDS,
    MOST_OPENINGS,
    MOST_SECONDS,
    TimedModel,
    draw_texts,
    limit_rounds,
    time_together,
)
from support.clock import Clock
from support.timing import TimerHere
from support.tiny_models import make_rows

TEXTS = [{"input_ids": np.ones((1, 5), np.int64)}] * 8


@pytest.mark.parametrize(
    ("requested", "teacher_seconds", "timed", "openings"),
    [(60, 0.001, 60, MOST_OPENINGS), (60, 0.4, 15, 3), (60, 3.0, LEAST_ROUNDS, 2), (4, 3.0, 4, 1)],
    ids=["short texts", "long texts", "very long texts", "few rounds requested"],
)
def test_long_texts_are_timed_less_often(
    requested: int, teacher_seconds: float, timed: int, openings: int, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    monkeypatch.setattr(latency, "time", clock)
    shares = {"teacher": 1, "student": 0.25}
    runners = {name: lambda _, share=share: clock.work(share * teacher_seconds) for name, share in shares.items()}
    timer = TimerHere(runners)
    monkeypatch.setattr(budget_timing, "open_timing_process", lambda *_: timer)
    models = dict.fromkeys(shares, TimedModel(ExportTarget("onnxruntime"), Path("no-files"), {0: TEXTS}))
    found = time_together(models, Budget(speedup="4"), 0, requested, Console(quiet=True), "timing")
    assert {name: each.repeats for name, each in found.items()} == dict.fromkeys(models, timed * len(TEXTS))
    assert timer.openings == openings
    assert found["student"].best_ms == pytest.approx(250 * teacher_seconds)


def test_rounds_without_measurable_time_are_not_limited():
    assert limit_rounds(60, 0.0) == 60
    seconds = (MOST_SECONDS / 60, MOST_SECONDS / 30, MOST_SECONDS)
    assert [limit_rounds(60, each) for each in seconds] == [60, 30, LEAST_ROUNDS]


def test_blocks_of_short_documents_are_repeated_until_they_fill_a_call(tokenizer):
    documents = Examples([text for text, _ in make_rows(12, 1)], None)
    texts = draw_texts(documents, Budget(speedup="2", batch=8), 64, 0, CausalLM(()))
    assert len(texts.task.encode(tokenizer, texts.examples, 64)) < 8
    ((length, calls),) = texts.inputs(tokenizer).items()
    assert (length, [len(call["input_ids"]) for call in calls]) == (0, [8])
