"""Tests which precisions train in which layouts, and that the others are rejected by name before a process starts."""

from dataclasses import replace

import pytest

from compress.measure import precision_modes
from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from distill.data.config import DataConfig
from distill.errors import InputError
from distill.parallel.layout import Layout, parse_layout
from distill.teacher.config import TeacherConfig
from distill.train.optimizer_kinds import OPTIMIZERS
from pipelines.settings.commands.distill import DistillConfig, MachineConfig
from pipelines.settings.defaults import fill_defaults
from pipelines.settings.facts import Facts
from pipelines.settings.layouts import Layouts
from pipelines.settings.rules.layouts import NOT_ON_SEVERAL
from pipelines.settings.rules.table import check_rules
from pipelines.stages.train import precision
from support.plans import plan_of

LAYOUTS = {
    "replicated": 2, "zero1": 2, "zero2": 2, "fsdp=2": 2, "tp=2": 2, "pp=2": 2,
    "hsdp=2x2": 4, "fsdp=2,tp=2": 4, "dp=2,tp=2": 4, "dp=2,pp=2": 4,
}  # fmt: skip
ONE_PROCESS = ("fp8", "bf16-stochastic", "int8-mixed")
MIXED = ("32", "bf16-mixed")


GRADUAL = {"budget": Budget(speedup="4"), "prune": PruneConfig(schedule="gradual")}


def check(
    name: str, layout: Layout, tuned: Layout | None = None, task: str = "text-classification", **machine: str
) -> None:
    settings = DistillConfig("unread", TeacherConfig("unread"), data=DataConfig("unread"))
    settings = replace(settings, machine=MachineConfig(precision="auto", **machine))
    check_rules(
        Facts(
            fill_defaults(settings), layout.processes, task, teacher_layout=layout,
            student_layout=layout, finetuning_layout=tuned or layout, precision=name,
        )
    )  # fmt: skip


def test_every_mode_has_a_row_in_the_table():
    assert {*MIXED, "16-mixed", *ONE_PROCESS} == set(precision_modes.MODES)
    assert tuple(NOT_ON_SEVERAL) == ONE_PROCESS
    for name in precision_modes.MODES:
        check(name, Layout())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stock_modes_train_in_every_layout_but_float16_not_in_stages(layout):
    parsed = parse_layout(layout, LAYOUTS[layout])
    for name in MIXED:
        check(name, parsed)
    if parsed.pp == 1:
        check("16-mixed", parsed)
        return
    with pytest.raises(InputError, match="machine.precision 16-mixed: expected a student without pipeline stages"):
        check("16-mixed", parsed)


@pytest.mark.parametrize("task", ["multi-label", "question-answering"])
@pytest.mark.parametrize(("layout", "tuned"), [("pp=2", None), ("tp=2", "pp=2")])
def test_tasks_with_several_classes_for_each_row_have_no_pipeline_stages(layout, tuned, task):
    whose = "teacher that may be fine-tuned" if tuned else "student"
    with pytest.raises(InputError, match=f"task {task}: expected a {whose} without pipeline stages, found pp=2"):
        check("32", parse_layout(layout, 2), tuned and parse_layout(tuned, 2), task)
    check("32", parse_layout("tp=2", 2), task=task)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_converted_models_train_on_one_process(name, layout):
    with pytest.raises(InputError, match=f"machine.precision {name}: expected one process, found [24]: .*; use bf16"):
        check(name, parse_layout(layout, LAYOUTS[layout]))


def test_a_teacher_in_stages_is_not_fine_tuned_in_float16():
    with pytest.raises(InputError, match="16-mixed: expected a teacher that may be fine-tuned without pipeline stages"):
        check("16-mixed", Layout(dp=2), tuned=Layout(pp=2))
    check("bf16-mixed", Layout(dp=2), tuned=Layout(pp=2))


def test_powersgd_takes_no_gradients_that_may_overflow():
    check("bf16-mixed", Layout(dp=2), gradient_compression="powersgd")
    check("16-mixed", Layout(dp=2), gradient_compression="bf16")
    with pytest.raises(InputError, match="machine.gradient_compression powersgd: expected precision 32 or bf16-mixed"):
        check("16-mixed", Layout(dp=2), gradient_compression="powersgd")


def test_deepspeed_trains_in_float32_or_bfloat16():
    pytest.importorskip("deepspeed")
    for name in MIXED:
        check(name, Layout(dp=2), strategy="deepspeed_stage_2")
    for name in ("16-mixed", *ONE_PROCESS):
        with pytest.raises(InputError, match=f"machine.precision {name}: expected"):
            check(name, Layout(dp=2), strategy="deepspeed_stage_2")


def test_auto_measures_only_precisions_that_train_in_the_layout(monkeypatch):
    monkeypatch.setattr(precision, "list_candidate_modes", lambda device: ("32", "bf16-mixed", "fp8", "16-mixed"))
    settings = DistillConfig("unread", TeacherConfig("unread"), data=DataConfig("unread"))

    def list_modes(layout: Layout) -> list[str]:
        return precision.list_accepted_modes(plan_of(settings, Layouts(layout, layout, layout)))

    assert list_modes(Layout()) == ["32", "bf16-mixed", "fp8", "16-mixed"]
    assert list_modes(Layout(dp=2)) == ["32", "bf16-mixed", "16-mixed"]
    assert list_modes(Layout(pp=2)) == ["32", "bf16-mixed"]


def test_auto_measures_only_precisions_in_which_units_are_masked_gradually(monkeypatch):
    monkeypatch.setattr(precision, "list_candidate_modes", lambda device: tuple(precision_modes.MODES))
    settings = DistillConfig("unread", TeacherConfig("unread"), data=DataConfig("unread"), **GRADUAL)
    assert precision.list_accepted_modes(plan_of(fill_defaults(settings))) == list(MIXED)


@pytest.mark.parametrize("setting", ["train", "teacher_train"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bfloat16_weights_are_trained_by_optimizers_that_round_stochastically(setting, optimizer):
    settings = DistillConfig("unread", TeacherConfig("unread"), data=DataConfig("unread"))
    training = replace(getattr(settings, setting), optimizer=optimizer)
    settings = replace(settings, machine=MachineConfig(precision="bf16-stochastic"), **{setting: training})
    facts = Facts(
        fill_defaults(settings), 1, "text-classification", teacher_layout=Layout(), student_layout=Layout(),
        finetuning_layout=Layout(), precision="bf16-stochastic",
    )  # fmt: skip
    if optimizer in ("adamw", "adamw-8bit", "adamw-4bit", "adamw-fp8"):
        check_rules(facts)
        return
    with pytest.raises(InputError, match=f"{setting}.optimizer {optimizer}: expected adamw, .* bf16-stochastic"):
        check_rules(facts)
