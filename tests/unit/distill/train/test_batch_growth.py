"""Tests of effective batches that grow during a training."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.train.batch_growth import BatchGrowth, NoiseScale
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.manifest import LOGS
from support.interrupted_training import BASE, Killed, killed_at, train_once

GROWING = replace(BASE, batch_growth="schedule", largest_batch=32, dropout=0.0)
NOISY = replace(BASE, batch_growth="noise", accumulate=2, largest_batch=32)


def test_the_noise_scale_is_the_trace_over_the_squared_gradient():
    draw = torch.Generator().manual_seed(0)
    gradient, deviation, width = torch.full((200,), 0.3), 2.0, 200
    noise = NoiseScale()
    assert noise.rows == 0.0
    for _ in range(600):
        rows = gradient + deviation * torch.randn(32, width, generator=draw)
        noise.observe(float(rows[:4].mean(0).square().sum()), float(rows.mean(0).square().sum()), 4, 32)
    expected = width * deviation**2 / float(gradient.square().sum())
    assert noise.rows == pytest.approx(expected, rel=0.15)


def test_the_batch_doubles_by_schedule_up_to_the_largest():
    growth = BatchGrowth(TrainConfig(batch_size=8, accumulate=2, batch_growth="schedule", largest_batch=100))
    rows = []
    for epoch in range(5):
        growth.start_epoch(epoch)
        growth.start_epoch(epoch)
        rows.append(8 * growth.accumulated)
    assert rows == [16, 32, 64, 64, 64]
    assert growth.rate_factor == 2.0
    linear = BatchGrowth(TrainConfig(rate_scaling="linear"))
    linear.factor = 4
    assert linear.rate_factor == 4.0


@pytest.mark.parametrize(("rows", "factor"), [(31.9, 1), (32.0, 2)])
def test_the_batch_doubles_once_the_noise_scale_is_twice_the_batch(rows, factor):
    growth = BatchGrowth(TrainConfig(batch_size=8, accumulate=2, batch_growth="noise"))
    growth.noise.trace, growth.noise.square, growth.noise.weight = rows, 1.0, 1.0
    growth.start_epoch(1)
    assert growth.factor == factor


def test_the_gradients_of_the_first_and_of_all_batches_are_compared():
    growth = BatchGrowth(TrainConfig(batch_size=8, accumulate=2, batch_growth="noise"))
    growth.observe_batch(5.0 / 4, 0)  # of the first batch's mean gradient, halved
    growth.observe_batch(2.0, 1)
    expected = NoiseScale()
    expected.observe(5.0, 2.0, 8, 16)
    assert growth.noise.rows == expected.rows


def read_logged(folder: Path, name: str) -> list[tuple[int, float]]:
    rows = [row for file in sorted((folder / LOGS).glob("*/metrics.csv")) for row in csv.DictReader(file.open())]
    return [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]


def test_rows_and_rate_grow_between_epochs(tiny_model, tokenizer, tmp_path):
    train_once(tiny_model, tokenizer, tmp_path, GROWING, LossConfig(kl=1))
    logged = [rows for _, rows in read_logged(tmp_path, "train/batch_rows")]
    assert logged == sorted(logged)
    assert set(logged) == {8.0, 16.0, 32.0}
    rates = dict(read_logged(tmp_path, "lr"))
    batches = math.ceil(52 / 8)
    steps = batches + math.ceil(batches / 2) + math.ceil(batches / 4)
    assert max(rates) < steps  # of 3 * batches without growth


def test_one_epoch_is_that_without_growth(tiny_model, tokenizer, tmp_path):
    one = replace(GROWING, epochs=1)
    grown = train_once(tiny_model, tokenizer, tmp_path / "grown", one, LossConfig(kl=1))
    plain = train_once(tiny_model, tokenizer, tmp_path / "plain", replace(one, batch_growth="none"), LossConfig(kl=1))
    assert all(torch.equal(grown[name], value) for name, value in plain.items())


def test_the_noise_is_measured_on_the_gradient_of_the_step(tiny_model, tokenizer, tmp_path, monkeypatch):
    observed, stepped = [], []

    def observe(growth, square, number):
        if number == growth.accumulated - 1:
            observed.append(square)

    def clip(module, optimizer, **settings):
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        stepped.append(float(torch.nn.utils.get_total_norm(gradients)) ** 2)

    monkeypatch.setattr(BatchGrowth, "observe_batch", observe)
    monkeypatch.setattr(DistillationModule, "configure_gradient_clipping", clip)
    train_once(tiny_model, tokenizer, tmp_path, replace(NOISY, epochs=1), LossConfig(kl=1))
    assert len(observed) == 52 // 16  # the last step is that of one batch
    assert stepped[: len(observed)] == pytest.approx(observed, rel=1e-5)


@pytest.mark.parametrize("config", [GROWING, NOISY], ids=["schedule", "noise"])
def test_a_killed_training_resumes_to_the_bit(tiny_model, tokenizer, tmp_path, monkeypatch, config):
    whole = train_once(tiny_model, tokenizer, tmp_path / "whole", config, LossConfig(kl=1))
    with monkeypatch.context() as patch:
        killed_at(11, patch)
        with pytest.raises(Killed):
            train_once(tiny_model, tokenizer, tmp_path / "killed", config, LossConfig(kl=1))
    resumed = train_once(tiny_model, tokenizer, tmp_path / "killed", config, LossConfig(kl=1))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_noise_without_accumulation_is_rejected():
    with pytest.raises(InputError, match="train.batch_growth noise: expected accumulate of 2 or more"):
        TrainConfig(batch_growth="noise")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_tokens": 1000}, "train.batch_growth schedule: expected no batch_tokens, found 1000"),
        ({"batch_size": 16, "largest_batch": 31}, "train.largest_batch: expected at least 32 rows, .* found 31"),
    ],
)
def test_batches_that_cannot_grow_are_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(batch_growth="schedule", **settings)
