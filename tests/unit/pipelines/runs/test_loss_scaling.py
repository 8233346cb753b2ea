"""Tests of trainings in float16: steps whose gradients overflow are skipped, and gradients are clipped unscaled."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback

from distill.losses.config import LossConfig
from distill.train.module import DistillationModule
from pipelines.runs.manifest import LOGS, SCRATCH
from pipelines.runs.training_checkpoint import TRAINING
from pipelines.runs.training_logs import SPIKES
from support.dtypes import RecordDtypes, StartScale
from support.interrupted_training import BASE, Killed, killed_at, train_once

PLAIN = replace(BASE, dropout=0.0)  # 7 batches an epoch, 21 in all
OVERFLOWS, TOO_LARGE, START = 9, 2.0**60, StartScale.SCALE
LOSS = LossConfig(kl=1)


class Overflow(StartScale):
    """Makes the gradients of one batch overflow by a scale that is too large, and records what becomes of its step."""

    def __init__(self, batch: int = OVERFLOWS) -> None:
        self.batch = batch
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.scale = 0.0  # after the batch
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module, batch, batch_idx: int) -> None:
        scaler, number = trainer.precision_plugin.scaler, count_batches(trainer, batch_idx)
        if number == self.batch + 1:
            scaler.update(START)
        if number == self.batch:
            scaler.update(TOO_LARGE)
            self.before = copy_state(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(outputs["loss"]))
        if count_batches(trainer, batch_idx) == self.batch:
            self.after = copy_state(trainer, pl_module)
            self.scale = trainer.precision_plugin.scaler.get_scale()


def count_batches(trainer: Trainer, batch_idx: int) -> int:
    return trainer.current_epoch * int(trainer.num_training_batches) + batch_idx


def copy_state(trainer: Trainer, module: DistillationModule) -> list[torch.Tensor]:
    """Returns the weights and the tensors of the optimizer, with its step counts."""
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    return [each.detach().clone() for each in [*module.parameters(), *states]]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_that_overflows_changes_neither_weights_nor_optimizer_and_halves_the_scale(
    optimizer, tiny_model, tokenizer, tmp_path
):
    """AdamW is fused and checks for overflows itself; SGD isn't stepped at all."""
    overflow = Overflow()
    config = replace(PLAIN, optimizer=optimizer, learning_rate=None, recoveries=1)
    weights = train_once(tiny_model, tokenizer, tmp_path, config, LOSS, [overflow], precision="16-mixed")
    assert all(value.isfinite().all() for value in weights.values())
    assert overflow.before
    assert all(torch.equal(one, other) for one, other in zip(overflow.before, overflow.after, strict=True))
    assert overflow.scale == TOO_LARGE / 2
    assert len(overflow.losses) == 21, "the losses are finite: no spike, and nothing is repeated"
    assert max(overflow.losses) < 10
    assert not (tmp_path / LOGS / SPIKES).exists()


@pytest.mark.slow
def test_the_schedule_goes_on_over_a_skipped_step(tiny_model, tokenizer, tmp_path):
    overflow, undisturbed = Overflow(), Overflow(batch=100)
    for name, callback in (("overflow", overflow), ("undisturbed", undisturbed)):
        train_once(tiny_model, tokenizer, tmp_path / name, PLAIN, LOSS, [callback], precision="16-mixed")
    assert overflow.rates == undisturbed.rates
    assert len(set(overflow.rates)) > 15


class SkipBatch(Callback):
    """Leaves a batch out."""

    def on_fit_start(self, trainer: Trainer, pl_module: DistillationModule) -> None:
        pl_module.spikes.skipped_batches = frozenset({OVERFLOWS})


@pytest.mark.slow
def test_a_skipped_step_trains_the_student_of_the_other_batches(tiny_model, tokenizer, tmp_path):
    overflowed, left_out = (
        train_once(tiny_model, tokenizer, tmp_path / name, PLAIN, LOSS, callbacks, precision="16-mixed")
        for name, callbacks in (("overflow", [Overflow()]), ("left-out", [StartScale(), SkipBatch()]))
    )
    assert all((overflowed[name] - value).abs().max() < 1e-5 for name, value in left_out.items())


def test_a_resumed_training_has_the_scale_of_its_checkpoint_and_ends_with_the_same_bits(
    tiny_model, tokenizer, tmp_path, monkeypatch
):
    expected = train_once(tiny_model, tokenizer, tmp_path / "whole", PLAIN, LOSS, [Overflow()], precision="16-mixed")
    with monkeypatch.context() as patch:
        killed_at(OVERFLOWS + 5, patch)
        with pytest.raises(Killed):
            train_once(tiny_model, tokenizer, tmp_path / "cut", PLAIN, LOSS, [Overflow()], precision="16-mixed")
    assert read_stored_scale(tmp_path / "cut") == START
    record = RecordScales()
    weights = train_once(tiny_model, tokenizer, tmp_path / "cut", PLAIN, LOSS, [record], precision="16-mixed")
    assert set(record.scales) == {START}, "not the scale that a training starts with"
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


class RecordScales(Callback):
    """Records the loss scale of each batch."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module, batch, batch_idx: int) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def read_stored_scale(folder: Path) -> float:
    (file,) = (folder / SCRATCH / "checkpoints").glob(f"*/{TRAINING}")
    return torch.load(file, weights_only=True)["LossScaling"]["scale"]


class RecordNorms(Callback):
    """Records the norm of the gradients before and after clipping."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: DistillationModule, optimizer) -> None:
        self.before.append(norm_of(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: DistillationModule, *_: object) -> None:
        self.after.append(norm_of(pl_module))


def norm_of(module: DistillationModule) -> float:
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.slow
def test_gradients_are_clipped_after_they_are_unscaled(tiny_model, tokenizer, tmp_path):
    config, half, full = replace(PLAIN, max_grad_norm=0.05, epochs=1), RecordNorms(), RecordNorms()
    train_once(tiny_model, tokenizer, tmp_path / "half", config, LOSS, [StartScale(), half], precision="16-mixed")
    train_once(tiny_model, tokenizer, tmp_path / "full", config, LOSS, [full])
    assert min(full.before) > 0.05
    assert half.before == pytest.approx(full.before, rel=0.1)
    assert half.after == pytest.approx([0.05] * 7, rel=1e-3)


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed"])
def test_weights_and_optimizer_states_are_float32_in_every_stock_mode(precision, tiny_model, tokenizer, tmp_path):
    dtypes = RecordDtypes()
    train_once(tiny_model, tokenizer, tmp_path, replace(PLAIN, epochs=1), LOSS, [dtypes], precision=precision)
    assert dtypes.recorded == {name: {torch.float32} for name in ("weights", "states", "used")}


@pytest.mark.slow
def test_training_in_float16_is_near_training_in_float32(tiny_model, tokenizer, tmp_path):
    unmoved = replace(PLAIN, epochs=1, learning_rate=1e-12)
    half, full, start = (
        train_once(tiny_model, tokenizer, tmp_path / str(number), config, LOSS, callbacks, precision=precision)
        for number, (precision, config, callbacks) in enumerate(
            [("16-mixed", PLAIN, [StartScale()]), ("32", PLAIN, []), ("32", unmoved, [])]
        )
    )

    def distance(one: dict[str, torch.Tensor]) -> float:
        return sum((one[name] - value).square().sum().item() for name, value in full.items()) ** 0.5

    assert 0 < distance(half) < 0.1 * distance(start), "a tenth of what the training moved the weights by"
