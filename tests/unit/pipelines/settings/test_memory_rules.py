"""Tests of the rules and stage keys of the settings that fit a training into memory."""

from dataclasses import replace

import pytest

from distill.data.config import DataConfig
from distill.errors import InputError
from distill.parallel.layout import Layout
from distill.student.spec import StudentConfig
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.settings.distill_config import DistillConfig, MachineConfig
from pipelines.settings.facts import Facts
from pipelines.settings.rules import check_training_layout
from pipelines.stages.prepare.teacher import select_key_settings

OFFLOADED = TrainConfig(offload="activations")


def facts_of(setting: str, layout: Layout, machine: MachineConfig | None = None) -> Facts:
    settings = DistillConfig(
        "runs/x",
        TeacherConfig("unread"),
        student=StudentConfig("layers=1"),
        data=DataConfig("unread"),
        machine=machine or MachineConfig(),
    )
    if setting == "general.train":
        settings = replace(settings, general=replace(settings.general, train=OFFLOADED))
    else:
        settings = replace(settings, **{setting: OFFLOADED})
    return Facts(settings, 1, student_layout=layout, tuned_layout=layout)


@pytest.mark.parametrize("setting", ["train", "general.train", "teacher_train"])
def test_activations_of_pipeline_stages_and_deepspeed_are_not_offloaded(setting):
    with pytest.raises(InputError, match=rf"^{setting}.offload activations: expected a layout without .* found pp=2"):
        check_training_layout(setting, facts_of(setting, Layout(pp=2)))
    with pytest.raises(InputError, match=rf"^{setting}.offload activations: .* no machine.strategy, found ds.json"):
        check_training_layout(setting, facts_of(setting, Layout(), MachineConfig(strategy="ds.json")))
    for layout in (Layout(), Layout(dp=2), Layout(fsdp=2), Layout(tp=2), Layout(dp=2, zero=1)):
        check_training_layout(setting, facts_of(setting, layout))


def test_offload_is_in_no_key():
    assert select_key_settings(OFFLOADED) == select_key_settings(TrainConfig())
