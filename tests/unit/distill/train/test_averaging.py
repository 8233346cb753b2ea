"""Tests of the running average of the weights: its values, what is validated and saved, and a resumed run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.train.averaging import WeightAverage
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


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_a_resumed_run_has_the_averages_of_an_undisturbed_one(name, tmp_path):
    def build() -> Job:
        torch.manual_seed(0)
        return Job(name, ema_decay=0.9)

    whole = build()
    for number in range(6):
        whole.step(number)
    whole.optimizer.eval()
    first = build()
    for number in range(3):
        first.step(number)
    first.optimizer.eval()  # as in a validation
    save_training(tmp_path / "checkpoint", first.student, [first.optimizer], {})
    resumed = build()
    load_training(tmp_path / "checkpoint", resumed.student, [resumed.optimizer])
    resumed.optimizer.train()
    for number in range(3, 6):
        resumed.step(number)
    resumed.optimizer.eval()
    for one, other in zip(whole.student.parameters(), resumed.student.parameters(), strict=True):
        assert torch.equal(one, other)


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
