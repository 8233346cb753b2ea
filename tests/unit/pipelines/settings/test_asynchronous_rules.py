"""Settings that are rejected for replicas that don't train in step."""

from dataclasses import replace
from typing import Any

import pytest

from distill.data.batches.sampling_config import SamplingConfig
from distill.data.config import DataConfig
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.student.config import StudentConfig
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.settings.commands.distill import DistillConfig, MachineConfig
from pipelines.settings.facts import Facts
from pipelines.settings.outer_config import ASYNCHRONOUS, OuterConfig
from pipelines.settings.rules.asynchronous import check_asynchronous, check_replica_precision

MACHINE = MachineConfig(strategy="hogwild", devices=2, accelerator="cpu")


def facts_of(processes: int = 1, **parts: Any) -> Facts:
    usual = {"teacher": TeacherConfig("unread"), "student": StudentConfig("layers=1"), "data": DataConfig("unread")}
    return Facts(DistillConfig("runs/x", **(usual | {"machine": MACHINE} | parts)), processes, precision="32")


@pytest.mark.parametrize("strategy", ASYNCHRONOUS)
def test_plain_settings_are_accepted(strategy):
    check_asynchronous(facts_of(machine=replace(MACHINE, strategy=strategy)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"machine": replace(MACHINE, devices=1)}, "machine.devices: expected 2 or more .* hogwild, found 1"),
        ({"processes": 2}, "processes: expected a command that starts the replicas itself, not torchrun"),
        ({"machine": replace(MACHINE, accelerator="auto")}, "machine.accelerator: expected cpu .* found auto"),
        ({"machine": replace(MACHINE, gradient_compression="bf16")}, "machine.gradient_compression: expected none"),
        ({"machine": replace(MACHINE, rank_speeds="1,2")}, "machine.rank_speeds: expected none .* found 1,2"),
        ({"machine": replace(MACHINE, memory="8GB")}, "machine.memory: expected none"),
        ({"student": StudentConfig("layers=1", layout="fsdp=2")}, "student.layout: expected auto .* found fsdp=2"),
        ({"student": StudentConfig("fresh,layers=1,hidden=8,norm=batchnorm")}, "student: expected no norm=batchnorm"),
        ({"train": TrainConfig(patience=2)}, "train.patience: expected 0 .* found 2"),
        ({"train": TrainConfig(batch_size="auto")}, "train.batch_size: expected a number"),
        ({"train": TrainConfig(schedule="plateau")}, "train.schedule: expected another schedule .* found plateau"),
        ({"train": TrainConfig(optimizer="schedule-free")}, "train.optimizer: expected another optimizer"),
        ({"train": TrainConfig(recoveries=1)}, "train.recoveries: expected 0"),
        ({"sampling": SamplingConfig(by="distance")}, "sampling.by: expected uniform"),
        ({"loss": LossConfig(balance_every=5)}, "loss.balance_every: expected 0"),
    ],
)
def test_settings_that_asynchronous_replicas_do_not_support_are_rejected(parts, message):
    with pytest.raises(InputError, match=rf"^{message}"):
        check_asynchronous(facts_of(**parts))


def test_settings_of_averaging_without_effect_are_rejected():
    with pytest.raises(InputError, match=r"^outer: expected the defaults with machine.strategy hogwild"):
        check_asynchronous(facts_of(outer=OuterConfig(every=5)))
    local = replace(MACHINE, strategy="local-sgd")
    check_asynchronous(facts_of(machine=local, outer=OuterConfig(every=5)))
    with pytest.raises(InputError, match=r"^outer: expected outer.every alone with machine.strategy local-sgd"):
        check_asynchronous(facts_of(machine=local, outer=OuterConfig(momentum=0.5)))
    check_asynchronous(facts_of(machine=replace(MACHINE, strategy="diloco"), outer=OuterConfig(momentum=0.5)))


def test_weights_in_low_precision_are_rejected():
    check_replica_precision(facts_of())
    with pytest.raises(InputError, match=r"^machine.precision fp8: expected 32 or bf16-mixed with .* hogwild"):
        check_replica_precision(replace(facts_of(), precision="fp8"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "outer.every: expected at least 1, found 0"),
        ({"every": 5, "fragments": 2}, "outer.every 5: expected a multiple of outer.fragments 2"),
        ({"every": 4, "fragments": 2, "delay": 2}, "outer.delay: expected 0 or more and less than the 2 steps"),
        ({"learning_rate": 0.0}, "outer.learning_rate: expected more than 0"),
        ({"momentum": 1.0}, "outer.momentum: expected 0 or more and less than 1"),
        ({"mix": 1.5}, "outer.mix: expected 0 to 1"),
    ],
)
def test_invalid_averaging_is_rejected(settings, message):
    with pytest.raises(InputError, match=f"^{message}"):
        OuterConfig(**settings)
