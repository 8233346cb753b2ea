"""Settings that are rejected for models whose rows are divided into segments."""

from dataclasses import replace
from typing import Any

import pytest

from compress.prune.budget import Budget
from distill.data.config import DataConfig
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.parallel.layout import Layout
from distill.student.config import StudentConfig
from distill.teacher.config import TeacherConfig
from distill.teacher.sequences_config import SequencesConfig
from distill.train.config import TrainConfig
from distill.train.steps.on_policy_config import OnPolicyConfig
from pipelines.settings.commands.distill import DistillConfig, GeneralConfig, MachineConfig
from pipelines.settings.facts import Facts
from pipelines.settings.layouts import layout_settings
from pipelines.settings.rules.segments import check_student_segments
from pipelines.settings.rules.table import check_rules

TWO, WHOLE = Layout(cp=2), Layout(dp=2)
ONLINE = TeacherConfig("unread", online=True)


def facts_of(
    student_layout: Layout = TWO, teacher_layout: Layout | None = None, task: str = "causal-lm", **parts: Any
) -> Facts:
    usual = {"teacher": TeacherConfig("unread"), "student": StudentConfig("layers=1"), "data": DataConfig("unread")}
    tokenizer_facts = {name: parts.pop(name) for name in ("own_tokenizer",) if name in parts}
    settings = DistillConfig("runs/x", **(usual | {"loss": LossConfig(kl=1, temperature=1.0)} | parts))
    layouts = {"teacher_layout": teacher_layout, "student_layout": student_layout, "finetuning_layout": teacher_layout}
    return Facts(settings, 2, task, **layouts, **tokenizer_facts)


def check(facts: Facts) -> None:
    check_rules(facts, about=("student_layout", "teacher_layout"))


@pytest.mark.parametrize("task", ["causal-lm", "chat", "masked-lm"])
@pytest.mark.parametrize("layout", [TWO, Layout(dp=2, cp=2), Layout(fsdp=2, cp=2)], ids=str)
def test_language_models_may_have_segments(task, layout):
    check(facts_of(layout, WHOLE, task))
    check(facts_of(layout, layout, task, teacher=ONLINE))
    check(facts_of(layout, layout, task, teacher=ONLINE, loss=LossConfig(kl=1, hidden=1)))


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering"])
def test_other_tasks_are_rejected(task):
    with pytest.raises(InputError, match=rf"^student.layout cp=2: expected masked-lm, causal-lm, chat .* found {task}"):
        check(facts_of(task=task))
    with pytest.raises(InputError, match=rf"^teacher.layout cp=2: expected masked-lm, causal-lm, chat .* found {task}"):
        check(facts_of(WHOLE, TWO, task, teacher=ONLINE))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"loss": LossConfig(attention=1)}, "loss.attention: expected 0 with student.layout cp=2, found 1.0: it compa"),
        ({"loss": LossConfig(relations=1)}, "loss.relations: expected 0 with"),
        ({"loss": LossConfig(balance_every=5)}, "loss.balance_every: expected 0 .* found 5: a process has a part"),
        ({"on_policy": OnPolicyConfig(share=0.5)}, "on_policy.share: expected 0 .* found 0.5: texts are generated"),
        ({"general": GeneralConfig(data="texts")}, "general.data: expected none .* found texts"),
        ({"budget": Budget(speedup="2")}, "budget: expected none .* pruned layers have different heads"),
        ({"machine": MachineConfig(rank_speeds="1,2")}, "machine.rank_speeds: expected none .* found 1,2"),
        ({"machine": MachineConfig(memory="8GB")}, "machine.memory: expected none .* found 8GB"),
        ({"train": TrainConfig(checkpointing="auto")}, "train.checkpointing: expected a mode .* found auto"),
        ({"teacher": replace(ONLINE, processes=1)}, "teacher.processes: expected 0 .* found 1"),
        ({"own_tokenizer": True}, "student: expected the teacher's .* found a tokenizer of its own"),
    ],
)
def test_settings_that_need_whole_rows_are_rejected_with_segments(parts, message):
    with pytest.raises(InputError, match=rf"^{message}"):
        check(facts_of(**parts))
    check_student_segments(facts_of(WHOLE, **parts))


@pytest.mark.parametrize(
    ("student", "teacher", "parts", "message"),
    [
        (TWO, TWO, {}, r"teacher.layout cp=2: expected teacher.online true .* found false"),
        (
            WHOLE,
            TWO,
            {"teacher": replace(ONLINE, processes=2)},
            r"teacher.layout cp=2: .* with cp, found teacher.processes 2",
        ),
        (TWO, TWO, {"teacher": ONLINE, "sequences": SequencesConfig(share=0.5)}, r"teacher.layout cp=2: .* by token"),
        (TWO, WHOLE, {"teacher": ONLINE}, r"teacher.layout replicated: expected cp=2, as student.layout cp=2 has"),
        (WHOLE, TWO, {"teacher": ONLINE}, r"teacher.layout cp=2: expected a layout without cp, as student.layout rep"),
    ],
)
def test_a_teacher_that_does_not_compute_the_students_segments_is_rejected(student, teacher, parts, message):
    with pytest.raises(InputError, match=rf"^{message}"):
        check(facts_of(student, teacher, **parts))


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [(ONLINE, "dp=2,cp=2"), (TeacherConfig("unread"), "auto"), (replace(ONLINE, layout="fsdp=2,cp=2"), "fsdp=2,cp=2")],
)
def test_a_teacher_that_is_asked_about_segments_has_the_students_layout_by_default(teacher, expected):
    settings = facts_of(teacher=teacher).settings
    settings = replace(settings, student=StudentConfig("layers=1", layout="dp=2,cp=2"))
    assert layout_settings(settings, 4)[0].text == expected
