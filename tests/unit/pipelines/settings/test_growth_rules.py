"""Tests that batches don't grow in a training whose schedule needs the number of its steps."""

from dataclasses import replace
from typing import Any

import pytest

from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from compress.sparsity.config import SparsityConfig
from distill.data.config import DataConfig
from distill.errors import InputError
from distill.parallel.layout import Layout
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.defaults import fill_defaults
from pipelines.settings.facts import Facts
from pipelines.settings.rules.table import check_rules

GROWING = TrainConfig(epochs=4, batch_size=8, accumulate=2, batch_growth="schedule")
PRUNED = {"budget": Budget(speedup="4", runtime="pytorch", precision="fp32")}


def check(train: TrainConfig, **settings: Any) -> None:
    config = DistillConfig("unread", TeacherConfig("unread"), data=DataConfig("unread"), train=train, **settings)
    layout = Layout()
    check_rules(
        Facts(
            fill_defaults(config), 1, "text-classification", teacher_layout=layout, student_layout=layout,
            finetuning_layout=layout, precision="32",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sparsity": SparsityConfig("2:4")}, "sparsity.pattern"),
        (PRUNED | {"prune": PruneConfig(schedule="gradual")}, "prune.schedule gradual"),
    ],
)
@pytest.mark.parametrize("growth", ["schedule", "noise"])
def test_growing_batches_are_rejected_with_a_schedule_over_the_steps(growth, settings, expected):
    with pytest.raises(InputError, match=f"^train.batch_growth {growth}: expected none with {expected}, found growing"):
        check(replace(GROWING, batch_growth=growth), **settings)
    check(replace(GROWING, batch_growth="none"), **settings)


def test_batches_grow_in_other_trainings():
    check(GROWING)
    check(GROWING, **PRUNED, prune=PruneConfig(schedule="iterative"))
