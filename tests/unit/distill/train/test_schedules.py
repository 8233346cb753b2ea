"""Tests of the learning rate over a training: shapes of schedules, and the factor that a plateau lowers."""

from dataclasses import replace

import pytest
import torch
from torch.optim import SGD

from distill.errors import InputError
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from distill.train.rate_control import RateControl
from distill.train.schedule import build_schedule
from support.tiny_models import build_model

STEPS = 100


def rates(**settings) -> list[float]:
    """Returns the learning rate of each step as a share of the peak."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = build_schedule(optimizer, TrainConfig(**({"warmup": 0} | settings)), STEPS)
    shares = []
    for _ in range(STEPS):
        shares.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return shares


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "linear"}, {0: 1.0, 50: 0.5, 75: 0.25}),
        ({"schedule": "cosine"}, {0: 1.0, 50: 0.5, 75: 0.1464}),
        ({"schedule": "constant"}, {0: 1.0, 50: 1.0, 99: 1.0}),
        ({"schedule": "polynomial", "power": 2}, {0: 1.0, 50: 0.25, 90: 0.01}),
        ({"schedule": "restarts", "cycles": 2}, {0: 1.0, 25: 0.5, 49: 0.001, 50: 1.0, 75: 0.5}),
        ({"schedule": "stable", "decay_share": 0.2}, {0: 1.0, 80: 1.0, 85: 0.5, 95: 0.134}),
        ({"schedule": "linear", "min_rate": 0.1}, {0: 1.0, 50: 0.55, 99: 0.109}),
        ({"schedule": "plateau"}, {0: 1.0, 50: 1.0, 99: 1.0}),
    ],
)
def test_each_schedule_has_the_expected_rates(settings, expected):
    found = rates(**settings)
    assert {step: found[step] for step in expected} == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("schedule", ["linear", "restarts", "stable", "plateau"])
def test_every_schedule_starts_with_the_warm_up(schedule):
    shares = rates(schedule=schedule, warmup=0.1)
    assert shares[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert shares[10] == 1.0


def test_a_factor_applies_from_the_next_step_on():
    optimizer, control = SGD([torch.zeros(1, requires_grad=True)], lr=1.0), RateControl()
    schedule = build_schedule(optimizer, TrainConfig(schedule="constant", warmup=0), STEPS, lambda: control.factor)
    control.factor = 0.5
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def observed(values: list[float], **settings) -> list[float]:
    control, config = RateControl(), TrainConfig(schedule="plateau", **settings)
    factors = []
    for value in values:
        control.observe_validation(value, config)
        factors.append(control.factor)
    return factors


def test_the_rate_falls_when_the_validation_stops_improving():
    assert observed([0.5, 0.6, 0.6, 0.6, 0.6, 0.7, 0.6], plateau_patience=1) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5]


def test_a_first_validation_that_is_not_a_number_is_not_the_best():
    assert observed([float("nan"), 0.5, 0.6, 0.7], plateau_patience=1) == [1, 1, 1, 1]


def test_validations_of_the_cooldown_are_ignored():
    assert observed([0.6] * 6, plateau_patience=0, plateau_cooldown=1) == [1, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_the_rate_never_falls_below_the_floor():
    assert observed([0.6] * 5, plateau_patience=0, min_rate=0.3) == [1, 0.5, 0.3, 0.3, 0.3]


def test_a_plateau_agrees_with_torchs_own():
    draw = torch.Generator().manual_seed(0)
    values = torch.rand(40, generator=draw).tolist()
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max", factor=0.5, patience=2, cooldown=1, threshold=0, threshold_mode="abs", eps=0
    )
    expected = []
    for value in values:
        theirs.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    assert observed(values, plateau_patience=2, plateau_cooldown=1) == expected


def test_a_restored_control_continues_where_the_saved_one_was():
    config = TrainConfig(schedule="plateau", plateau_patience=1)
    first = RateControl()
    for value in (0.5, 0.4):
        first.observe_validation(value, config)
    second = RateControl()
    second.load_state_dict(first.state_dict())
    assert first.observe_validation(0.4, config)
    assert second.observe_validation(0.4, config)
    assert second == first


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)])
def test_the_rate_follows_the_effective_batch(scaling, expected):
    config = TrainConfig(
        learning_rate=1e-3, batch_size=16, accumulate=4, reference_batch=16, rate_scaling=scaling, optimizer="sgd"
    )
    assert config.peak_rate == pytest.approx(expected)
    assert replace(config, accumulate=1).peak_rate == 1e-3
    (group,) = {each["lr"] for each in build_optimizer(build_model("bert"), [], config).param_groups}
    assert group == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"power": 0.0}, "train.power: expected more than 0"),
        ({"cycles": 0}, "train.cycles: expected at least 1"),
        ({"decay_share": 0.0}, "train.decay_share: expected a share above 0"),
        ({"plateau_factor": 1.0}, "train.plateau_factor: expected a factor between 0 and 1"),
        ({"plateau_patience": -1}, "train.plateau_patience: expected at least 0"),
        ({"min_rate": 1.0}, "train.min_rate: expected a share from 0 to below 1"),
    ],
)
def test_impossible_schedules_are_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        replace(TrainConfig(), **settings)
