"""Tests that the report shows what happened in a training: range test, spikes, and falls of the learning rate."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from distill.losses.config import LossConfig
from distill.train.spikes import Spike
from pipelines.reports.render import Charts, render_html
from pipelines.runs.manifest import LOGS
from pipelines.runs.training_logs import RangeTest, TrainingLogs, store_test
from pipelines.stages.deliver.report import read_curves
from pipelines.stages.deliver.training_events import read_training_events
from support.interrupted_training import BASE, Killed, killed_at, train_once
from support.sample_reports import Page, sample_curves, sample_report

# At this rate no score changes, so that every validation but the first is without improvement.
STUCK = replace(BASE, schedule="plateau", learning_rate=1e-12, plateau_patience=0, warmup=0)  # 7 batches an epoch


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Returns logs with a range test, two spikes and a fall."""
    logs = TrainingLogs(tmp_path / LOGS)
    store_test(RangeTest((1e-6, 1e-4, 2.1e-2, 1.0), (2.0, 1.9, 0.5, 4.0)), logs.range_test)
    spikes = Spike(44, 41, 93.04, 2.1), Spike(1, 1, math.inf, math.nan)
    logs.spikes.write_text(json.dumps([vars(spike) for spike in spikes]))
    logs.write_falls([(1200, 0.125)])
    return logs.folder


def test_a_stage_without_events_has_none(tmp_path):
    assert read_training_events(tmp_path) is None


def test_spikes_that_are_not_finite_are_null_in_the_report(logs):
    spikes = read_training_events(logs)["spikes"]
    assert spikes[0] == {"step": 41, "batch": 44, "loss": 93.04, "usual": 2.1, "factor": 0.5}
    assert spikes[1] == {"step": 1, "batch": 1, "loss": None, "usual": None, "factor": 0.25}
    json.dumps(spikes, allow_nan=False)


def test_the_page_shows_the_events_in_charts_and_sentences(logs):
    report = sample_report() | {"trainings": {"distill": read_training_events(logs)}}
    page = Page(render_html(report, sample_curves()))
    text = " ".join(page.text.split())
    assert page.tags.count("svg") == Page(render_html(sample_report(), sample_curves())).tags.count("svg") + 1
    assert "script" not in page.tags
    for sentence in (
        "Range test: learning rate 0.0021 of 1e-06 to 1, a tenth of the rate with the lowest loss (0.5).",
        "Spike in step 41: loss 93, usual 2.1; back to the checkpoint before it, without batch 44, at 50 % of",
        "Spike in step 1: a loss that isn't finite; back to the checkpoint before it, without batch 1, at 25 % of",
        "The validation stopped improving: the learning rate was reduced to 12.5 % in step 1,200 of its schedule.",
        "chosen: 0.0021",
    ):
        assert sentence in text
    assert "spike" in draw_charts(report, sample_curves())["distill-training-loss-and-its-unweighted-terms.svg"]


def draw_charts(report, curves) -> dict[str, str]:
    return Charts.of(report, curves).files()


def test_spikes_and_falls_are_marked_in_the_charts_of_their_training_only(logs):
    report = sample_report() | {"trainings": {"teacher": read_training_events(logs)}}
    charts = draw_charts(report, sample_curves())
    assert {"teacher-range-test-of-the-learning-rate.svg", "teacher-learning-rate.svg"} <= charts.keys()
    marked = {name for name, svg in charts.items() if ">spike<" in svg}
    assert marked == {"teacher-training-loss.svg", "teacher-learning-rate.svg"}
    assert {name for name, svg in charts.items() if ">plateau<" in svg} == {"teacher-learning-rate.svg"}


def test_events_without_curves_are_described_in_sentences(logs):
    report = sample_report() | {"trainings": {"distill": read_training_events(logs) | {"range_test": None}}}
    assert "Spike in step 41" in " ".join(Page(render_html(report, {})).text.split())


@pytest.mark.slow
def test_falls_on_a_plateau_are_kept_with_the_logs_of_a_resumed_training(tiny_model, tokenizer, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        killed_at(16, patch)
        with pytest.raises(Killed):
            train_once(tiny_model, tokenizer, tmp_path, STUCK, LossConfig(kl=1))
    train_once(tiny_model, tokenizer, tmp_path, STUCK, LossConfig(kl=1))
    events = read_training_events(tmp_path / LOGS)
    assert events["falls"] == [{"step": 14, "factor": 0.5}, {"step": 21, "factor": 0.25}]
    rates = [row["lr"] for row in read_curves(tmp_path / LOGS) if "lr" in row]
    assert {round(rate * 1e12, 3) for rate in rates} == {1.0, 0.5}, "the last fall comes after the last step"
