"""Memory budgets and measured settings that are rejected before any stage."""

from dataclasses import replace

import pytest

from distill.errors import InputError
from distill.parallel.layout import Layout, parse_layout
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from distill.train.steps.on_policy_config import OnPolicyConfig
from pipelines.runs import cli
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig, MachineConfig
from pipelines.settings.facts import Facts
from pipelines.settings.layouts import Layouts
from pipelines.settings.resolve import check_memory_floor
from pipelines.settings.rules.table import check_rules
from support.plans import plan_of


def settings_with(*more: str) -> DistillConfig:
    arguments = ["--teacher=t", "--teacher.finetune=never", "--student=layers=1", "--data=d", "--output=o", *more]
    return cli.parse(DistillConfig, arguments, prog="x", about="", examples="", short=SHORT_OPTIONS)


def check(settings: DistillConfig, layout: str, processes: int) -> None:
    student_layout = parse_layout(layout, processes) if processes > 1 else Layout()
    check_rules(
        Facts(settings, processes, student_layout=student_layout, finetuning_layout=student_layout, precision="32")
    )


@pytest.mark.parametrize(
    ("arguments", "layout", "processes", "message"),
    [
        (("--machine.memory", "8GB"), "pp=2", 2, "machine.memory 8GB: .* found 2 pipeline stages"),
        (("--train.checkpointing", "auto"), "pp=2", 2, "train.checkpointing auto: .* found 2 pipeline stages"),
        (("--train.batch_size", "auto"), "zero2", 2, "train.batch_size auto: expected one process .* 2 processes"),
        (("--batch-size", "auto", "--train.batch_tokens", "64"), "", 1, "no batch_tokens, found batch_tokens 64"),
        (("--teacher_train.batch_size", "auto"), "fsdp=2", 2, "teacher_train.batch_size auto: expected one process"),
    ],
)
def test_trainings_that_cant_be_measured_are_rejected(arguments, layout, processes, message):
    with pytest.raises(InputError, match=message):
        check(settings_with(*arguments), layout, processes)


def test_on_policy_training_is_rejected_with_a_budget():
    settings = replace(
        settings_with("--machine.memory", "8GB"),
        on_policy=OnPolicyConfig(share=0.5),
        teacher=TeacherConfig(model="t", online=True),
    )
    with pytest.raises(InputError, match="found sequences that the student generates"):
        check(settings, "", 1)


def test_layouts_with_whole_steps_may_have_a_budget():
    for layout, processes in (("", 1), ("zero2", 2), ("fsdp=2", 2), ("tp=2", 2)):
        check(settings_with("--machine.memory", "8GB", "--train.checkpointing", "auto"), layout, processes)


def test_a_budget_is_a_size_or_auto():
    assert MachineConfig(memory="auto").memory == "auto"
    with pytest.raises(Exception, match="machine.memory: expected a size such as 10MB, 8MiB or 500000, found 'much'"):
        MachineConfig(memory="much")


def test_auto_batches_have_the_rows_of_the_reference_batch():
    config = TrainConfig(batch_size="auto", reference_batch=48)
    assert config.rows == 48
    assert config.resolve().peak_rate == TrainConfig(batch_size=48).resolve().peak_rate


def test_a_budget_without_room_for_the_weights_is_rejected_before_any_stage():
    settings = settings_with("--machine.memory", "50MB")
    with pytest.raises(InputError, match=r"machine.memory 50MB: expected at least [\d,]+ MB to train the student"):
        check_memory_floor(plan_of(settings))
    check_memory_floor(plan_of(settings_with("--machine.memory", "100GB")))
    check_memory_floor(plan_of(settings_with()))


def test_sharded_weights_need_less():
    messages = []
    for layout in (Layout(), parse_layout("fsdp=4", 4)):
        with pytest.raises(InputError) as error:
            check_memory_floor(plan_of(settings_with("--machine.memory", "1MB"), Layouts(layout, layout, layout)))
        messages.append(int(str(error.value).split("at least ")[1].split(" MB")[0].replace(",", "")))
    assert messages[1] < messages[0]
