"""Tests that a training goes back to its last checkpoint after a spike of the loss, at half the rate."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback

from compress.sparsity.config import SparsityConfig
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.spikes import SpikeDetector
from distill.train.steps.progressive import LayerByLayer
from pipelines.runs.manifest import LOGS
from pipelines.runs.training_logs import SPIKES
from pipelines.stages.deliver.training_events import read_training_events
from pipelines.stages.train.sparsity import SparsityCallback
from support.interrupted_training import BASE, Killed, killed_at, train_once

RECOVERING = replace(BASE, recoveries=1, warmup=0, schedule="constant", dropout=0.0)  # 7 batches an epoch
POISONED = 9


class RecordRates(Callback):
    """Records the learning rate with which each batch is trained."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        number = trainer.current_epoch * int(trainer.num_training_batches) + batch_idx
        if not pl_module.spikes.is_skipping:
            self.rates[number] = trainer.optimizers[0].param_groups[0]["lr"]


@pytest.fixture
def poison(monkeypatch):
    """Returns a function that makes a training's loss infinite on some batches."""

    def add(numbers: set[int], loss: float = math.inf) -> None:
        compute_terms = DistillationModule.compute_terms

        def poisoned(self, batch):
            terms = compute_terms(self, batch)
            number = (
                self.trainer.current_epoch * int(self.trainer.num_training_batches) + self.trainer.fit_loop.batch_idx
            )
            bad = self.training and number in numbers
            return {name: value * loss if bad else value for name, value in terms.items()}

        monkeypatch.setattr(DistillationModule, "compute_terms", poisoned)

    return add


def spikes_in(folder: Path) -> list[dict]:
    return json.loads((folder / LOGS / SPIKES).read_text())


@pytest.mark.parametrize(
    "loss", [math.inf, *(pytest.param(loss, marks=pytest.mark.slow) for loss in (math.nan, 100.0))]
)
def test_a_poisoned_batch_costs_its_step_and_halves_the_rate(loss, poison, tiny_model, tokenizer, tmp_path):
    poison({POISONED}, loss)
    record = RecordRates()
    weights = train_once(tiny_model, tokenizer, tmp_path, RECOVERING, LossConfig(kl=1), [record])
    assert all(value.isfinite().all() for value in weights.values())
    (spike,) = spikes_in(tmp_path)
    assert (spike["batch"], spike["step"]) == (POISONED, POISONED)
    events = read_training_events(tmp_path / LOGS)
    assert events["spikes"] == [
        {
            "step": POISONED, "batch": POISONED, "loss": spike["loss"] if loss == 100.0 else None,
            "usual": spike["usual"], "factor": 0.5,
        }
    ]  # fmt: skip
    assert record.rates.keys() == set(range(21)) - {POISONED}
    assert {record.rates[number] for number in range(POISONED - 1)} == {1e-3}
    assert {record.rates[number] for number in range(POISONED + 1, 21)} == {5e-4}


def test_a_spike_before_the_first_checkpoint_goes_back_to_the_start(poison, tiny_model, tokenizer, tmp_path):
    poison({0})
    record = RecordRates()
    config = replace(RECOVERING, checkpoint_every=100)
    train_once(tiny_model, tokenizer, tmp_path, config, LossConfig(kl=1), [record])
    assert record.rates == dict.fromkeys(range(1, 21), 5e-4)


@pytest.mark.slow
def test_a_run_killed_after_its_recovery_ends_with_the_same_bits(poison, tiny_model, tokenizer, tmp_path, monkeypatch):
    poison({POISONED})
    expected = train_once(tiny_model, tokenizer, tmp_path / "undisturbed", RECOVERING, LossConfig(kl=1))
    for batch in (POISONED + 1, POISONED + 4):
        with monkeypatch.context() as patch:
            killed_at(batch, patch)
            with pytest.raises(Killed):
                train_once(tiny_model, tokenizer, tmp_path / f"at-{batch}", RECOVERING, LossConfig(kl=1))
        weights = train_once(tiny_model, tokenizer, tmp_path / f"at-{batch}", RECOVERING, LossConfig(kl=1))
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_masks_that_depend_on_gradients_leave_out_those_of_the_skipped_step(poison, tiny_model, tokenizer, tmp_path):
    poison({POISONED})
    sparsity = SparsityConfig("unstructured", 0.5, score="movement", begin=0.0, end=0.8)
    train_once(tiny_model, tokenizer, tmp_path, RECOVERING, LossConfig(kl=1), [callback := SparsityCallback(sparsity)])
    assert (spikes_in(tmp_path)[0]["batch"], callback.training.step) == (POISONED, 21)
    assert all(scores.isfinite().all() for scores in callback.training.scores.values())


@pytest.mark.parametrize("spike", [20, pytest.param(POISONED, marks=pytest.mark.slow)], ids=["last zeros", "before"])
def test_a_skipped_step_counts_in_the_schedule_of_the_zeros(spike, poison, tiny_model, tokenizer, tmp_path):
    poison({spike})
    callback = SparsityCallback(SparsityConfig("unstructured", 0.5, end=1.0))
    train_once(tiny_model, tokenizer, tmp_path, RECOVERING, LossConfig(kl=1), [callback])
    assert (spikes_in(tmp_path)[0]["batch"], callback.training.step) == (spike, 21)
    shares = [float((weight == 0).float().mean()) for weight in callback.training.weights.values()]
    assert shares == pytest.approx([0.5] * len(shares), abs=0.01)


def test_more_spikes_than_recoveries_end_the_training(poison, tiny_model, tokenizer, tmp_path):
    poison({3, POISONED})
    with pytest.raises(InputError, match=r"test: expected a loss near .*, found inf in step 9, after 1 recoveries"):
        train_once(tiny_model, tokenizer, tmp_path, RECOVERING, LossConfig(kl=1))


def test_a_training_without_recoveries_does_not_look_for_spikes(poison, tiny_model, tokenizer, tmp_path):
    poison({POISONED}, 100.0)
    train_once(tiny_model, tokenizer, tmp_path, replace(RECOVERING, recoveries=0), LossConfig(kl=1))
    assert not (tmp_path / LOGS / SPIKES).exists()


def test_a_spike_is_a_loss_far_above_the_median():
    detector = SpikeDetector(ratio=4)
    assert not any(detector.is_spike(loss) for loss in (90.0, 1.0, 1.0, 1.2, 0.8, 1.0, 50.0, 1.0)), "too few to judge"
    assert not detector.is_spike(3.9)
    assert detector.is_spike(4.1)
    assert detector.is_spike(math.nan)
    assert len(detector.losses) == 9, "spikes aren't counted"


@pytest.mark.parametrize(("name", "value"), [("recoveries", -1), ("spike", 1.0)])
def test_impossible_settings_are_rejected(name, value):
    with pytest.raises(InputError, match=f"train.{name}: expected"):
        TrainConfig(**{name: value})


class RecordOptimizedParameters(Callback):
    """Records how many parameters the optimizer of each fit has."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module) -> None:
        self.counts.append(sum(len(group["params"]) for group in trainer.optimizers[0].param_groups))


def test_a_spike_in_a_layers_turn_leaves_all_layers_to_the_training_after_it(poison, tiny_model, tokenizer, tmp_path):
    """Before, the optimizer had only the layer whose turn it was, and the other layers were never trained again."""
    poison({3})
    loss, record = LossConfig(kl=0, hidden=1), RecordOptimizedParameters()
    callbacks = [LayerByLayer(0.8), record]  # two layers, in 8 steps each
    weights = train_once(tiny_model, tokenizer, tmp_path / "spike", RECOVERING, loss, callbacks)
    assert spikes_in(tmp_path / "spike")[0]["batch"] == 3
    assert len(record.counts) == 2
    assert record.counts[0] == record.counts[1]
    still = train_once(tiny_model, tokenizer, tmp_path / "still", replace(RECOVERING, learning_rate=1e-30), loss)
    for layer in (0, 1):
        names = [name for name in weights if f"encoder.layer.{layer}." in name and name.endswith("weight")]
        assert names
        assert not any(torch.equal(weights[name], still[name]) for name in names)
