"""Layouts that `auto` stands for on several processes."""

from dataclasses import replace

import pytest
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM

from distill.data.config import DataConfig
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.parallel.layout import parse_layout
from distill.student.config import StudentConfig
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.planner.auto_layouts import fill_layouts
from pipelines.planner.hardware import Hardware
from pipelines.settings.commands.distill import DistillConfig, MachineConfig

FOUR = Hardware(nodes=1, devices=4, memory=10**9, flops=1e12, links=100e9, bandwidth=10e9)


def build_settings(folder, task: str, **changed: object) -> DistillConfig:
    settings = DistillConfig(
        output="o", teacher=TeacherConfig(str(folder)), student=StudentConfig("layers=4"),
        data=DataConfig("d", max_length=64), task=task, train=TrainConfig(batch_size=8),
        machine=MachineConfig(precision="32"),
    )  # fmt: skip
    return replace(settings, **changed)


@pytest.fixture
def decoder(tmp_path):
    LlamaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


@pytest.fixture
def classifier(tmp_path):
    BertConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024,
        architectures=["BertForSequenceClassification"], num_labels=5,
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def test_small_models_are_left_to_their_size(decoder):
    settings = build_settings(decoder, "causal-lm")
    assert fill_layouts(settings, 4, FOUR) == settings


@pytest.mark.slow
def test_large_models_get_the_layouts_of_the_fastest_pair(decoder):
    settings = fill_layouts(build_settings(decoder, "causal-lm"), 4, replace(FOUR, memory=60 * 10**6))
    assert parse_layout(settings.student.layout, 4).sharded or settings.student.layout.startswith("zero")
    assert parse_layout(settings.teacher.layout, 4).processes == 4


@pytest.mark.slow
def test_a_layout_in_the_settings_is_kept(decoder):
    settings = build_settings(decoder, "causal-lm")
    settings = replace(settings, student=replace(settings.student, layout="tp=4"))
    planned = fill_layouts(settings, 4, replace(FOUR, memory=60 * 10**6))
    assert planned.student.layout == "tp=4"
    assert planned.teacher.layout != "auto"


@pytest.mark.slow
def test_a_teacher_that_may_be_trained_gets_room_for_its_states(classifier):
    """Frozen, its 25 MB would fit whole; its states take 100 MB."""
    planned = fill_layouts(build_settings(classifier, "text-classification"), 4, replace(FOUR, memory=110 * 10**6))
    assert parse_layout(planned.teacher.layout, 4).shards > 1


@pytest.mark.slow
def test_models_that_fit_nowhere_are_rejected(decoder):
    with pytest.raises(InputError, match="layouts: expected a pair that fits"):
        fill_layouts(build_settings(decoder, "causal-lm"), 4, replace(FOUR, memory=10**6))


@pytest.mark.parametrize(
    "changed",
    [{"machine": MachineConfig(strategy="deepspeed_stage_2")}, {"student": StudentConfig("layers=4", layout="fsdp=4")}],
)
def test_runs_that_leave_no_choice_are_unchanged(decoder, changed):
    settings = build_settings(decoder, "causal-lm", **changed)
    if "student" in changed:
        settings = replace(settings, teacher=replace(settings.teacher, layout="fsdp=4"))
    assert fill_layouts(settings, 4, replace(FOUR, memory=10**6)) == settings


def test_runs_without_a_teacher_are_left_to_their_size(decoder):
    settings = build_settings(decoder, "causal-lm", loss=LossConfig(kl=0, ce=1))
    assert fill_layouts(settings, 4, replace(FOUR, memory=10**6)) == settings


@pytest.mark.slow
def test_models_that_cannot_be_traced_are_left_to_their_size(decoder, monkeypatch):
    def fail(self, **inputs: object) -> None:
        raise ZeroDivisionError("data")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    settings = build_settings(decoder, "causal-lm")
    assert fill_layouts(settings, 4, replace(FOUR, memory=60 * 10**6)) == settings


def test_one_process_has_no_layout(decoder):
    settings = build_settings(decoder, "causal-lm")
    assert fill_layouts(settings, 1, replace(FOUR, memory=10**6)) == settings
