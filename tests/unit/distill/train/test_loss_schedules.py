"""Tests of loss weights and temperatures that change during training, and of weights balanced by gradients."""

import csv
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from distill.errors import InputError
from distill.losses.compose import (
    compute_balance_factors,
    compute_gradient_norms,
    compute_gradient_shares,
    weighted_sum,
)
from distill.losses.config import LossConfig
from distill.student.build import build_student
from distill.teacher.online import OnlineTeacher
from distill.train.balance import GradientBalance
from distill.train.module import DistillationModule
from support.tiny_models import build_model
from unit.distill.train.test_module import BERT_SIZES, TRAIN, data, quiet_trainer  # noqa: F401 - data is a fixture


def module(loss: LossConfig) -> DistillationModule:
    teacher = build_model("bert")
    signals = OnlineTeacher(teacher, loss.teacher_outputs)
    student = build_student(teacher, "layers=2")
    return DistillationModule(student, loss=loss, train=TRAIN, signals=signals, teacher_sizes=BERT_SIZES)


def logged(distiller: DistillationModule, data, folder: Path, **settings) -> list[dict[str, str]]:  # noqa: F811
    logger = CSVLogger(folder, name="", version="log")
    lightning.seed_everything(0, verbose=False)
    quiet_trainer(logger=logger, log_every_n_steps=1, **settings).fit(distiller, datamodule=data)
    with (folder / "log" / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("train/kl")]


def test_a_term_that_a_ramp_starts_or_ends_is_computed():
    assert LossConfig(ramps={"hidden": (0.0, 1.0)}).teacher_outputs == ("logits", "hidden")
    assert LossConfig(hidden=1, ramps={"hidden": (0.0, 0.0)}).teacher_outputs == ("logits",)
    assert LossConfig(ramps={"ce": (1.0, 0.0)}).computes("hidden", "ce")
    assert LossConfig(ramps={"ce": (0.5, 0.0)}).terms == "kl=1, ce=0.5"
    assert not LossConfig().computes("hidden", "ce")


def test_a_ramp_interpolates_linearly_between_its_two_values():
    loss = LossConfig(kl=1, hidden=9, ramps={"hidden": (2.0, 0.0), "temperature": (4.0, 1.0)})
    assert (loss.peak_weight("hidden"), loss.resolved_temperature) == (2.0, 4.0), "not the plain settings' 9 and 2"
    assert [loss.interpolate_ramps(share).hidden for share in (0.0, 0.25, 1.0)] == [2.0, 1.5, 0.0]
    assert [loss.interpolate_ramps(share).temperature for share in (0.0, 0.5, 1.0)] == [4.0, 2.5, 1.0]
    assert LossConfig(ramps={"ce": (0.0, 1.0)}).interpolate_ramps(0.5).ce == 0.5
    assert loss.without_layer_terms.ramps == {"temperature": (4.0, 1.0)}
    plain = LossConfig(kl=1)
    assert plain.interpolate_ramps(0.7) is plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ramps": {"speed": (1.0, 0.0)}}, "relations, embedding, similarity or temperature with"),
        ({"ramps": {"ce": (1.0, -1.0)}}, "with two values >= 0, found ce"),
        ({"ramps": {"kl": (1.0, 0.0)}}, "expected weights with a sum > 0 at the end, found 0"),
        ({"ramps": {"temperature": (2.0, 0.0)}}, "loss.temperature: expected more than 0"),
        ({"balance_every": -1}, "loss.balance_every: expected at least 0 steps"),
    ],
)
def test_an_invalid_schedule_is_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        LossConfig(**settings)


def test_training_follows_its_ramp_in_equal_steps(data, tmp_path):  # noqa: F811
    rows = logged(module(LossConfig(kl=1, ramps={"ce": (0.0, 2.0)})), data, tmp_path, max_epochs=2)
    weights = [float(row["train/ce_weight"] or 0) for row in rows]
    assert weights[0] == 0
    assert weights[-1] == 2
    steps = [later - earlier for earlier, later in zip(weights, weights[1:], strict=False)]
    assert max(steps) == pytest.approx(min(steps), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"hidden": 1}, True),
        ({"hidden": 1, "ramps": {"kl": (0.5, 1)}}, True),
        ({"ce": 1, "ramps": {"kl": (0, 1), "relations": (1, 0)}}, True),
        ({"kl": 0, "hidden": 1}, False),
        ({"kl": 0, "relations": 1}, False),
        ({"kl": 0, "embedding": 1}, True),
        ({"kl": 0, "similarity": 1, "ramps": {"embedding": (1, 0)}}, False),
        ({"hidden": 1, "ramps": {"kl": (0, 1)}}, False),
        ({"ramps": {"hidden": (0, 1)}}, False),
    ],
)
def test_parameters_may_have_no_gradient_without_a_term_on_outputs_or_with_a_weight_of_0(settings, expected):
    assert LossConfig(**settings).trains_every_parameter is expected


def test_balanced_gradients_have_the_shares_of_the_weights():
    x = torch.ones(3, requires_grad=True)
    terms = {"kl": (x * torch.tensor([100.0, 0, 0])).sum(), "ce": (x * torch.tensor([0, 0.01, 0])).sum()}
    balance, loss = GradientBalance(10), LossConfig(kl=3, ce=1)
    balance.update(0, terms, [x], lambda norm: norm)
    assert compute_gradient_shares(balance.scale_weights(loss), terms, [x]) == pytest.approx({"kl": 0.75, "ce": 0.25})
    before = dict(balance.factors)
    balance.update(7, {name: 5 * term for name, term in terms.items()}, [x], lambda norm: norm)
    assert balance.factors == before, "between the steps that set them they stay"
    balance.update(10, terms | {"ce": 4 * terms["ce"]}, [x], lambda norm: norm)
    assert balance.factors["ce"] / balance.factors["kl"] == pytest.approx(before["ce"] / before["kl"] / 2), "halfway"


def test_a_term_without_a_gradient_gets_the_factor_1():
    assert compute_balance_factors({"kl": 0.0, "ce": 2.0}, {}) == {"kl": 1.0, "ce": 1.0}


def test_steps_without_a_terms_gradient_leave_the_balance_as_it_is():
    both = compute_balance_factors({"kl": 1.0, "ce": 4.0}, {})
    for norms in ({"kl": 1.0, "ce": 0.0}, {"kl": 1.0}) * 20:
        assert compute_balance_factors(norms, both)["ce"] == both["ce"]
    assert compute_balance_factors({"kl": 1.0, "ce": 4.0}, both) == pytest.approx(both)


def test_the_gradient_of_a_term_on_frozen_weights_has_norm_0():
    weight, frozen = nn.Parameter(torch.ones(2)), torch.ones(2)
    norms = compute_gradient_norms({"kl": weight.sum(), "hidden": frozen.sum()}, [weight])
    assert norms == {"kl": pytest.approx(2**0.5), "hidden": 0.0}


def test_balance_factors_are_saved_and_restored_with_a_checkpoint(data, tmp_path):  # noqa: F811
    distiller = module(LossConfig(kl=1, ce=1, hidden=100, balance_every=2))
    rows = logged(distiller, data, tmp_path, max_epochs=1)
    assert float(rows[-1]["train/hidden_weight"]) != 100
    assert set(distiller.balance.factors) == {"kl", "ce", "hidden"}
    checkpoint: dict = {}
    distiller.on_save_checkpoint(checkpoint)
    again = module(distiller.loss)
    again.on_load_checkpoint(checkpoint)
    assert again.balance.factors == distiller.balance.factors
    assert again.current_loss == distiller.current_loss


def test_weights_outside_training_are_not_scaled():
    distiller = module(LossConfig(kl=1, ce=1, balance_every=1))
    assert distiller.current_loss is distiller.loss
    assert isinstance(distiller.student, nn.Module)
    assert weighted_sum(distiller.current_loss, {"kl": torch.ones(()), "ce": torch.ones(())}) == 2
