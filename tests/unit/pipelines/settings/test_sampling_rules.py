"""Tests of the rules on batches of tokens where a sampler chooses the rows of an epoch."""

from typing import Any

import pytest

from compress.prune.budget import Budget
from distill.data.augment.config import AugmentConfig
from distill.data.batches.sampling_config import SamplingConfig
from distill.data.config import DataConfig
from distill.data.select.config import SelectConfig
from distill.errors import InputError
from distill.student.config import StudentConfig
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts
from pipelines.settings.rules.table import check_rules

TOKENS = TrainConfig(batch_tokens=2000)


def check(**parts: Any) -> None:
    usual = {"teacher": TeacherConfig("unread"), "student": StudentConfig("layers=1"), "data": DataConfig("unread")}
    check_rules(Facts(DistillConfig("runs/x", **(usual | parts)), 1))


def check_beside_pruned(**parts: Any) -> None:
    """Checks settings with a student without attention beside a pruned one."""
    check(student=StudentConfig("teacher", attention_free="static"), budget=Budget(speedup="4"), **parts)


@pytest.mark.parametrize("method", ["el2n", "forgetting", "aum"])
def test_a_teacher_whose_training_is_recorded_has_no_batches_of_tokens(method):
    select = SelectConfig(method=method, share=0.5)
    message = f"data.select {method}: expected teacher_train.batch_tokens 0, found 2000"
    with pytest.raises(InputError, match=message):
        check(select=select, teacher_train=TOKENS)
    check(select=select)
    check(select=SelectConfig(method="random", share=0.5), teacher_train=TOKENS)


@pytest.mark.parametrize(
    "parts",
    [
        {"sampling": SamplingConfig(by="length")},
        {"augment": AugmentConfig(kinds="swap", ratio=0.5)},
    ],
)
def test_students_without_attention_have_no_batches_of_tokens_where_a_sampler_chooses_rows(parts):
    message = "expected attention_free_train.batch_tokens 0, found 2000: the number of batches would differ"
    with pytest.raises(InputError, match=message):
        check_beside_pruned(attention_free_train=TOKENS, **parts)
    check_beside_pruned(**parts)
    check(attention_free_train=TOKENS, **parts)
    check_beside_pruned(attention_free_train=TOKENS)
