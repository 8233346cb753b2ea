"""Tests of the rules and stage keys of the settings that fit a training into memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.prune.budget import Budget
from compress.quantize.config import QuantizeConfig
from distill.checkpoint.checkpoint import Checkpoint
from distill.data.config import DataConfig
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.parallel.layout import Layout
from distill.student.config import StudentConfig
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from distill.train.steps.on_policy_config import OnPolicyConfig
from pipelines.settings.commands.distill import DistillConfig, GeneralConfig, MachineConfig
from pipelines.settings.facts import Facts
from pipelines.settings.rules.layouts import check_training_layout
from pipelines.settings.rules.table import check_rules
from pipelines.stages.prepare.teacher import select_key_settings

OFFLOADED, WINDOW = TrainConfig(offload="activations"), TrainConfig(backward_window=1024)


def settings_of(**parts: Any) -> DistillConfig:
    usual = {"teacher": TeacherConfig("unread"), "student": StudentConfig("layers=1"), "data": DataConfig("unread")}
    return DistillConfig("runs/x", **(usual | parts))


def checkpoint_of(**description: Any) -> Checkpoint:
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | description
    return Checkpoint("it", "teacher", Path("unread"), content)


def facts_of(
    setting: str, layout: Layout, machine: MachineConfig | None = None, train: TrainConfig = OFFLOADED
) -> Facts:
    settings = settings_of(machine=machine or MachineConfig())
    if setting == "general.train":
        settings = replace(settings, general=replace(settings.general, train=train))
    else:
        settings = replace(settings, **{setting: train})
    return Facts(settings, 1, student_layout=layout, finetuning_layout=layout)


@pytest.mark.parametrize("setting", ["train", "general.train", "teacher_train"])
def test_activations_of_pipeline_stages_and_deepspeed_are_not_offloaded(setting):
    with pytest.raises(InputError, match=rf"^{setting}.offload activations: expected a layout without .* found pp=2"):
        check_training_layout(setting, facts_of(setting, Layout(pp=2)))
    with pytest.raises(InputError, match=rf"^{setting}.offload activations: .* no machine.strategy, found ds.json"):
        check_training_layout(setting, facts_of(setting, Layout(), MachineConfig(strategy="ds.json")))
    for layout in (Layout(), Layout(dp=2), Layout(fsdp=2), Layout(tp=2), Layout(dp=2, zero=1)):
        check_training_layout(setting, facts_of(setting, layout))


def test_offload_does_not_change_the_key_of_a_stage():
    assert select_key_settings(OFFLOADED) == select_key_settings(TrainConfig())


@pytest.mark.parametrize("setting", ["train", "teacher_train"])
def test_a_backward_window_needs_one_process(setting):
    for layout in (Layout(dp=2), Layout(fsdp=2), Layout(tp=2), Layout(pp=2)):
        with pytest.raises(InputError, match=rf"^{setting}.backward_window 1024: expected one process, found "):
            check_training_layout(setting, facts_of(setting, layout, train=WINDOW))
    with pytest.raises(InputError, match=rf"^{setting}.backward_window 1024: expected one process, found ds.json"):
        check_training_layout(setting, facts_of(setting, Layout(), MachineConfig(strategy="ds.json"), WINDOW))
    check_training_layout(setting, facts_of(setting, Layout(), train=WINDOW))


def read_rejection(facts: Facts) -> str:
    """Returns the message of the first rule that rejects."""
    with pytest.raises(InputError) as caught:
        check_rules(facts)
    return str(caught.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"loss": LossConfig(kl=1, hidden=0.5)}, "expected kl and ce alone, found loss.hidden 0.5"),
        ({"loss": LossConfig(kl=1, attention=0.5)}, "expected kl and ce alone"),
        ({"loss": LossConfig(kl=1, ramps={"relations": (0, 1)})}, "expected kl and ce alone"),
        ({"loss": LossConfig(kl=1, ce=1, balance_every=10)}, "expected loss.balance_every 0, found 10"),
        ({"on_policy": OnPolicyConfig(share=0.5)}, "expected on_policy.share 0, found 0.5"),
        ({"budget": Budget(speedup="2"), "loss": LossConfig(kl=1)}, "expected no target speed"),
        ({"quantize": QuantizeConfig(scheme="int8"), "loss": LossConfig(kl=1)}, "expected no quantize.scheme, found"),
        ({"train": replace(WINDOW, schedule="find")}, "expected another schedule than find"),
    ],
)
def test_settings_that_need_whole_documents_are_rejected_with_a_backward_window(parts, message):
    assert message in read_rejection(Facts(settings_of(**({"train": WINDOW} | parts)), 1))
    if "train" not in parts:
        plain = Facts(settings_of(**parts), 1)
        check_rules(plain)


def test_a_backward_window_is_for_decoders():
    message = read_rejection(Facts(settings_of(general=GeneralConfig(train=WINDOW)), 1))
    assert message.startswith("general.train.backward_window: expected 0, found 1024")
    for setting in ("train", "teacher_train"):
        message = read_rejection(Facts(settings_of(**{setting: WINDOW}), 1, task="text-classification"))
        assert message.startswith(f"{setting}.backward_window: expected causal-lm or chat, found text-classification")


def test_packed_rows_are_rejected_beside_a_backward_window():
    chat = Facts(settings_of(train=WINDOW), 1, task="chat")
    assert read_rejection(chat).startswith(
        "train.backward_window: expected data.packing none, found documents by default: keys of a document"
    )
    packed = settings_of(train=WINDOW, data=DataConfig("unread", packing="documents"))
    assert "expected data.packing none or stream, found documents: keys" in read_rejection(
        Facts(packed, 1, task="causal-lm")
    )
    for task, packing in (("chat", "none"), ("causal-lm", "auto"), ("causal-lm", "none"), ("causal-lm", "stream")):
        check_rules(Facts(settings_of(train=WINDOW, data=DataConfig("unread", packing=packing)), 1, task=task))


def test_a_student_with_its_own_tokenizer_is_rejected_beside_a_backward_window():
    settings = settings_of(train=WINDOW, teacher=TeacherConfig("unread", online=True), loss=LossConfig(kl=1))
    facts = Facts(settings, 1, task="causal-lm", own_tokenizer=True)
    assert read_rejection(facts).startswith("train.backward_window: expected 0 for a student with its own tokenizer")


def test_layers_without_keys_and_values_are_rejected_beside_a_backward_window():
    kinds = ["full_attention", "linear_attention"]
    facts = Facts(settings_of(train=WINDOW), 1, task="causal-lm", teacher=checkpoint_of(layer_types=kinds))
    message = read_rejection(facts)
    assert message.startswith(
        "train.backward_window: expected layers of full_attention or sliding_attention, found linear"
    )
    plain = checkpoint_of(layer_types=["full_attention", "sliding_attention"])
    check_rules(replace(facts, teacher=plain))
    check_rules(replace(facts, student=plain))


def test_a_backward_window_is_in_the_key_only_when_it_is_set():
    assert "backward_window" not in select_key_settings(TrainConfig())
    assert select_key_settings(WINDOW) == select_key_settings(TrainConfig()) | {"backward_window": 1024}


def test_a_negative_backward_window_is_rejected():
    with pytest.raises(InputError, match="train.backward_window: expected at least 0, found -1"):
        TrainConfig(backward_window=-1)
