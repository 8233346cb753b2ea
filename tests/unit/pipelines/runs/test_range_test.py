"""Tests of the range test, which finds a learning rate before the training."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.losses.config import LossConfig
from distill.train.module import DistillationModule
from pipelines.runs.manifest import LOGS
from pipelines.runs.range_test import StepTaker
from pipelines.runs.training_logs import RANGE_TEST as FILE
from pipelines.runs.training_logs import RangeTest, load_test, store_test
from pipelines.stages.deliver.training_events import read_training_events
from support.interrupted_training import BASE, Killed, killed_at, train_once

FINDING = replace(BASE, schedule="find", learning_rate=None)


def test_the_rate_is_a_tenth_of_the_one_with_the_lowest_loss():
    assert RangeTest((1e-4, 1e-3, 1e-2, 1e-1), (2.0, 1.5, 1.0, 3.0)).rate == pytest.approx(1e-3)


def test_a_stored_test_is_read_as_it_was_written(tmp_path):
    test = RangeTest((1e-4, 0.1234567890123), (2.0, 1.0 / 3))
    store_test(test, tmp_path / "logs" / FILE)
    assert load_test(tmp_path / "logs" / FILE) == test
    assert [path.name for path in (tmp_path / "logs").iterdir()] == [FILE]


@pytest.fixture(scope="module")
def range_test_run(tiny_model, tokenizer, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("found")
    return folder, train_once(tiny_model, tokenizer, folder, FINDING, LossConfig(kl=1))


def test_the_training_is_that_with_the_found_rate_from_the_initial_weights(
    range_test_run, tiny_model, tokenizer, tmp_path
):
    folder, weights = range_test_run
    test = load_test(folder / LOGS / FILE)
    events = read_training_events(folder / LOGS)
    assert events == {
        "range_test": {"rates": test.rates, "losses": test.losses, "chosen": test.rate}, "spikes": [], "falls": [],
        "ranks": [],
    }  # fmt: skip
    assert len(test.rates) > 30
    assert 1e-5 < test.rate < 1e-1
    assert test.losses[0] > min(test.losses)
    config = replace(BASE, schedule="linear", learning_rate=test.rate)
    expected = train_once(tiny_model, tokenizer, tmp_path, config, LossConfig(kl=1))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_steps_of_the_test_compute_in_the_precision_of_the_training(precision, dtype, tiny_model, token_batch):
    torch.manual_seed(0)
    batch = token_batch | {"labels": torch.tensor([0, 1, 2, 3, 4, 0])}
    weights, losses = [], []
    for name in ("32", precision):
        model = copy.deepcopy(tiny_model("bert"))
        module = DistillationModule(model, loss=LossConfig(kl=0, ce=1), train=replace(BASE, dropout=0.0))
        module.on_fit_start()
        step_taker = StepTaker(module, torch.optim.SGD(model.parameters(), 0.1), 1.0, name)
        dtypes = set()
        model.classifier.register_forward_hook(lambda layer, inputs, output, seen=dtypes: seen.add(output.dtype))
        losses.append(step_taker.take_step(batch))
        weights.append(model.classifier.weight.detach())
        assert dtypes == {torch.float32 if name == "32" else dtype}
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert torch.allclose(weights[1], weights[0], atol=2e-3)
    assert not torch.equal(weights[1], weights[0])


@pytest.mark.slow
def test_a_killed_training_resumes_with_the_rate_that_it_found(
    range_test_run, tiny_model, tokenizer, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        killed_at(9, patch)
        with pytest.raises(Killed):
            train_once(tiny_model, tokenizer, tmp_path, FINDING, LossConfig(kl=1))
    before = (tmp_path / LOGS / FILE).stat().st_mtime_ns
    weights = train_once(tiny_model, tokenizer, tmp_path, FINDING, LossConfig(kl=1))
    assert (tmp_path / LOGS / FILE).stat().st_mtime_ns == before
    assert all(torch.equal(weights[name], value) for name, value in range_test_run[1].items())
