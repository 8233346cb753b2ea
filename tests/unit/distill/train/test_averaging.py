"""Tests of the running average of the weights: its values, what is validated and saved, and a resumed run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.train.averaging import AVERAGE, WeightAverage
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer
from pipelines.runs.training_checkpoint import load_training, save_training
from support.tiny_models import build_model
from unit.distill.train.test_module import TRAIN, data, quiet_trainer  # noqa: F401 - data is a fixture
from unit.distill.train.test_optimizers import Job


def test_the_average_is_that_of_all_steps_with_more_weight_on_the_last():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    unused = nn.Parameter(torch.tensor([5.0]))
    optimizer = torch.optim.SGD([weight, unused], lr=0.5)
    average, values = WeightAverage(optimizer, 0.5), []
    for step in range(12):
        weight.grad = torch.tensor([1.0, float(step)])
        optimizer.step()
        values.append(weight.detach().clone())
    expected = values[0]
    for step, value in enumerate(values[1:], 2):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    average.eval()
    torch.testing.assert_close(weight.detach(), expected)
    average.eval()
    torch.testing.assert_close(weight.detach(), expected, msg="a second call changes nothing")
    average.train()
    assert torch.equal(weight.detach(), values[-1])
    assert unused.item() == 5.0


def follow_weights(dtype: torch.dtype, steps: int = 3000) -> tuple[nn.Parameter, WeightAverage]:
    """Returns weights of a dtype after a drift from 1 to 4, and their average."""
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    average = WeightAverage(torch.optim.SGD([weight], lr=0.0), 0.999)
    for step in range(steps):
        with torch.no_grad():
            weight.copy_(torch.linspace(1, 1.5, 64) + 2.5 * step / steps)
        weight.grad = torch.zeros_like(weight)
        average.optimizer.step()
    return weight, average


def test_the_average_follows_weights_in_bfloat16_as_those_in_float32():
    """In bfloat16 it froze: a step of 1 - 0.999 of the distance is less than the last bit of the average."""
    (exact, expected), (weight, average) = follow_weights(torch.float32), follow_weights(torch.bfloat16)
    found = average.optimizer.state[weight][AVERAGE]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.optimizer.state[exact][AVERAGE], atol=1e-3, rtol=0)
    average.eval()
    assert torch.equal(weight.detach(), found.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_average_are_the_same_bits_after_a_validation(dtype):
    weight, average = follow_weights(dtype, steps=20)
    trained = weight.detach().clone()
    kept = average.optimizer.state[weight][AVERAGE].clone()
    for _ in range(2):
        average.eval()
        assert not torch.equal(weight.detach(), trained)
        average.train()
        assert torch.equal(weight.detach(), trained)
        assert torch.equal(average.optimizer.state[weight][AVERAGE], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_a_resumed_run_has_the_averages_of_an_undisturbed_one(name, dtype, tmp_path):
    def build() -> Job:
        torch.manual_seed(0)
        job = Job(name, ema_decay=0.9, learning_rate=1e-2)
        job.student.to(dtype)
        return job

    whole = build()
    for number in range(6):
        whole.step(number)
    whole.optimizer.eval()
    first = build()
    for number in range(3):
        first.step(number)
    first.optimizer.eval()  # as in a validation
    averages = [weight.detach().clone() for weight in first.student.parameters()]
    save_training(tmp_path / "checkpoint", first.student, [first.optimizer], {})
    assert all(torch.equal(*pair) for pair in zip(averages, first.student.parameters(), strict=True))
    resumed = build()
    load_training(tmp_path / "checkpoint", resumed.student, [resumed.optimizer])
    resumed.optimizer.train()
    for number in range(3, 6):
        resumed.step(number)
    resumed.optimizer.eval()
    for one, other in zip(whole.student.parameters(), resumed.student.parameters(), strict=True):
        assert torch.equal(one, other)
        states = whole.optimizer.state[one], resumed.optimizer.state[other]
        assert torch.equal(states[0][AVERAGE], states[1][AVERAGE])


def test_the_validated_and_the_trained_model_have_the_averages(data):  # noqa: F811
    module = DistillationModule(build_model("bert"), loss=LossConfig(kl=0, ce=1), train=replace(TRAIN, ema_decay=0.9))
    weight = module.student.classifier.weight
    seen: dict[str, list[torch.Tensor]] = {"trained": [], "validated": []}

    class Record(Callback):
        def on_validation_batch_start(self, trainer, pl_module, *rest: Any) -> None:
            seen["validated"].append(weight.detach().clone())

        def on_train_batch_start(self, trainer, pl_module, *rest: Any) -> None:
            seen["trained"].append(weight.detach().clone())

    quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[Record()]).fit(module, datamodule=data)
    assert torch.equal(weight, seen["validated"][-1])
    assert not any(torch.equal(one, other) for one in seen["validated"] for other in seen["trained"])


def test_averages_that_processes_cannot_share_are_rejected():
    with pytest.raises(InputError, match="train.ema_decay: expected 0 with the optimizer schedule-free"):
        TrainConfig(optimizer="schedule-free", ema_decay=0.9)
    with pytest.raises(InputError, match="train.ema_decay: expected a decay from 0 to below 1, found 1"):
        TrainConfig(ema_decay=1.0)
    with pytest.raises(InputError, match="found those of zero1"):
        build_optimizer(build_model("bert"), [], TrainConfig(ema_decay=0.9), shard=True)
