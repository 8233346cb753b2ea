"""Tests that interrupted and resumed training ends with the same bits as uninterrupted training."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from distill.losses.config import LossConfig
from pipelines.runs import console as consoles
from pipelines.runs import trainer as trainers
from pipelines.runs.callbacks.early_stop import EarlyStop
from pipelines.runs.callbacks.fit_progress import FitProgress
from pipelines.runs.manifest import OPTIMIZER_BITS, SCRATCH
from pipelines.stages.deliver.report import read_curves
from support import interrupted_training
from support.interrupted_training import BASE, SPLITS, Killed, examples, killed_at, train_once

SETTINGS = {
    "plain": (BASE, LossConfig(kl=1)),
    "accumulated": (replace(BASE, accumulate=2, epochs=2, checkpoint_every=1), LossConfig(kl=1)),
    "hidden states projected": (replace(BASE, epochs=2), LossConfig(kl=1, ce=0.5, hidden=1)),
    "plateau": (replace(BASE, epochs=4, schedule="plateau", plateau_patience=0), LossConfig(kl=1)),
    "early stopping": (replace(BASE, patience=1, epochs=4), LossConfig(kl=1)),
}


EVERY = (1, 2, 3, 6, 7, 8, 11, 14)


@pytest.mark.parametrize(
    ("setting", "batches"),
    [("plain", (1, 7, 14)), *(pytest.param(name, EVERY, marks=pytest.mark.slow) for name in SETTINGS)],
)
def test_a_run_stopped_at_any_batch_ends_with_bit_identical_weights(
    setting, batches, tiny_model, tokenizer, tmp_path, monkeypatch
):
    config, loss = SETTINGS[setting]
    expected = train_once(tiny_model, tokenizer, tmp_path / "undisturbed", config, loss)
    for batch in batches:
        folder = tmp_path / f"at-{batch}"
        with monkeypatch.context() as patch:
            killed_at(batch, patch)
            with pytest.raises(Killed):
                train_once(tiny_model, tokenizer, folder, config, loss)
        assert batch <= config.checkpoint_every * config.accumulate or list(
            (folder / SCRATCH / "checkpoints").glob("*.ckpt")
        )
        weights = train_once(tiny_model, tokenizer, folder, config, loss)
        for name, value in expected.items():
            assert torch.equal(weights[name], value), f"{name} differs after a stop at batch {batch}"


@pytest.mark.slow
def test_several_stops_in_one_epoch_change_nothing(tiny_model, tokenizer, tmp_path, monkeypatch):
    expected = train_once(tiny_model, tokenizer, tmp_path / "undisturbed", BASE, LossConfig(kl=1))
    for batch in (3, 2, 4):  # counted from each resumption
        with monkeypatch.context() as patch:
            killed_at(batch, patch)
            with pytest.raises(Killed):
                train_once(tiny_model, tokenizer, tmp_path / "stopped", BASE, LossConfig(kl=1))
    weights = train_once(tiny_model, tokenizer, tmp_path / "stopped", BASE, LossConfig(kl=1))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("batch", [1, 3, 4])  # an epoch has three batches
def test_the_progress_of_a_resumed_run_counts_every_row_once(batch, tiny_model, tokenizer, tmp_path, monkeypatch):
    config = replace(BASE, epochs=2, checkpoint_every=1)
    monkeypatch.setattr(interrupted_training, "SPLITS", replace(SPLITS, train=examples(24, 1)))
    with monkeypatch.context() as patch:
        killed_at(batch, patch)
        with pytest.raises(Killed):
            train_once(tiny_model, tokenizer, tmp_path / "stopped", config, LossConfig(kl=1))
    meters, real = [], consoles.Meter
    monkeypatch.setattr(consoles, "Meter", lambda total: meters.append(real(total)) or meters[-1])
    train_once(tiny_model, tokenizer, tmp_path / "stopped", config, LossConfig(kl=1))
    assert [(meter.done, meter.total) for meter in meters] == [(48, 48)]


class ScriptedScores(Callback):
    """Gives each validation the next score of a list, and keeps copies of the validated and of the trained weights."""

    def __init__(self, scores: Sequence[float]):
        self.scores = iter(scores)
        self.validated: list[dict[str, torch.Tensor]] = []
        self.trained: list[dict[str, torch.Tensor]] = []

    def on_validation_epoch_start(self, trainer, pl_module) -> None:
        score = torch.tensor(next(self.scores))
        pl_module.metric.compute = lambda: score
        self.validated.append(copy_student(pl_module))

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.trained.append(copy_student(pl_module))


def copy_student(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items() if name.startswith("student.")}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_early_stopping_ends_after_its_patience_with_the_best_weights(ema_decay, tiny_model, tokenizer, tmp_path):
    config = replace(BASE, patience=2, epochs=5, ema_decay=ema_decay)
    scripted = ScriptedScores((0.5, 0.7, 0.6, 0.65, 0.9))
    found = train_once(tiny_model, tokenizer, tmp_path, config, LossConfig(kl=1), [scripted])
    assert len(scripted.validated) == 4, "two epochs after the best one"
    assert [equal(found, weights) for weights in scripted.validated] == [False, True, False, False]
    assert equal(found, scripted.trained[1]) == (not ema_decay), "with averages, the averages are kept"


@pytest.fixture
def reported(monkeypatch) -> list[dict[str, float]]:
    """The metrics that the trainings of the test returned."""
    metrics, real = [], trainers.fit_module
    monkeypatch.setattr(trainers, "fit_module", lambda *args, **more: metrics.append(real(*args, **more)))
    return metrics


def test_the_metrics_are_those_of_the_best_weights(reported, tiny_model, tokenizer, tmp_path):
    scripted = ScriptedScores((0.5, 0.7, 0.6, 0.65, 0.9))
    train_once(tiny_model, tokenizer, tmp_path, replace(BASE, patience=2, epochs=5), LossConfig(kl=1), [scripted])
    assert reported[0]["val/score"] == pytest.approx(0.7)
    logged = [row["val/loss"] for row in read_curves(tmp_path / "logs") if "val/loss" in row]
    assert reported[0]["val/loss"] == pytest.approx(logged[1]) != pytest.approx(logged[3])


def test_without_patience_the_metrics_are_those_of_the_last_validation(reported, tiny_model, tokenizer, tmp_path):
    scripted = ScriptedScores((0.5, 0.7, 0.6))
    train_once(tiny_model, tokenizer, tmp_path, BASE, LossConfig(kl=1), [scripted])
    assert reported[0]["val/score"] == pytest.approx(0.6)


def test_the_metrics_include_the_bits_of_reduced_optimizer_states(
    reported, tiny_model, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainers, "fit_into_memory", lambda *args: {OPTIMIZER_BITS: 8.0})
    train_once(tiny_model, tokenizer, tmp_path, replace(BASE, epochs=1), LossConfig(kl=1))
    assert reported[0][OPTIMIZER_BITS] == 8
    assert "val/score" in reported[0]


def test_a_run_resumed_after_its_best_epoch_returns_the_metrics_of_that_epoch(
    reported, tiny_model, tokenizer, tmp_path, monkeypatch
):
    config, scores = replace(BASE, patience=2, epochs=5), (0.5, 0.7, 0.6, 0.65, 0.9)
    with monkeypatch.context() as patch:
        killed_at(17, patch)  # in the third epoch
        with pytest.raises(Killed):
            train_once(tiny_model, tokenizer, tmp_path, config, LossConfig(kl=1), [ScriptedScores(scores)])
    train_once(tiny_model, tokenizer, tmp_path, config, LossConfig(kl=1), [ScriptedScores(scores[2:])])
    assert reported[0]["val/score"] == pytest.approx(0.7)


@pytest.mark.slow
def test_a_run_killed_after_its_early_stop_does_not_train_on(reported, tiny_model, tokenizer, tmp_path, monkeypatch):
    config = replace(BASE, patience=1, epochs=6, learning_rate=1e-9)  # no epoch is better than the first
    batches, counted = [], FitProgress.on_train_batch_end
    expected = train_once(tiny_model, tokenizer, tmp_path / "undisturbed", config, LossConfig(kl=1))

    def killed(self, module) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(EarlyStop, "restore", killed)
        with pytest.raises(Killed):
            train_once(tiny_model, tokenizer, tmp_path / "stopped", config, LossConfig(kl=1))
    monkeypatch.setattr(FitProgress, "on_train_batch_end", lambda *args: (batches.append(1), counted(*args)))
    weights = train_once(tiny_model, tokenizer, tmp_path / "stopped", config, LossConfig(kl=1))
    assert not batches
    assert reported[1] == reported[0] != {}
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_curves_of_a_resumed_run_hold_each_step_once(tiny_model, tokenizer, tmp_path, monkeypatch):
    config = replace(BASE, checkpoint_every=3)
    train_once(tiny_model, tokenizer, tmp_path / "whole", config, LossConfig(kl=1))
    with monkeypatch.context() as patch:
        killed_at(11, patch)
        with pytest.raises(Killed):
            train_once(tiny_model, tokenizer, tmp_path / "stopped", config, LossConfig(kl=1))
    train_once(tiny_model, tokenizer, tmp_path / "stopped", config, LossConfig(kl=1))

    def read_curve(folder: str) -> list[tuple[float, float]]:
        return [(row["step"], row["train/kl"]) for row in read_curves(tmp_path / folder / "logs") if "train/kl" in row]

    assert read_curve("stopped") == read_curve("whole")
