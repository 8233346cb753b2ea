"""Tests which students a budget gives if no pruned model reaches some of its speeds."""

from pathlib import Path
from typing import Any

import pytest

from compress.prune.budget import Budget
from distill.data.config import DataConfig
from distill.errors import InputError
from distill.teacher.config import TeacherConfig
from pipelines.reports.pruning_summary import UNREACHED
from pipelines.runs.stage import Artefact
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import SpeedTarget
from pipelines.stages import students
from support.plans import plan_of

EARLIER = {name: Artefact(name, Path(name), name, {}) for name in ("data", "teacher", "cache")}


@pytest.fixture
def prune(monkeypatch) -> Any:
    """A function that returns the names of the students of speed-ups 2 and 4, from stages that aren't run.

    Its arguments are the names of the reached targets, and of the students without attention.
    """

    def prune_students(reached: tuple[str, ...], attention_free: tuple[str, ...]) -> list[str]:
        def prune_to(pipeline: object, target: SpeedTarget) -> dict[str, Artefact]:
            metrics = {} if target.name in reached else {UNREACHED: f"{target.name} is too fast"}
            shape = Artefact(f"shape-{target.name}", Path("shape"), "shape", {"metrics": metrics})
            trained = {f"distill-{target.name}": shape} if target.name in reached else {}
            return {f"shape-{target.name}": shape} | trained

        trained = dict.fromkeys(attention_free, EARLIER["data"])
        for name in ("pruning_start_stage", "costs_stage", "scores_stage", "build_pruning_context"):
            monkeypatch.setattr(students, name, lambda *inputs: EARLIER["data"])
        monkeypatch.setattr(students, "prune_to", prune_to)
        monkeypatch.setattr(students, "train_attention_free_students", lambda *inputs: trained)
        budget = Budget(speedup="2,4", frontier=True)
        settings = DistillConfig("unread", TeacherConfig("unread"), data=DataConfig("unread"), budget=budget)
        run: Any = None
        found, stages = students.prune_students(run, plan_of(settings), EARLIER, "32")
        assert all(each.stage in stages.values() for each in found)
        return [each.name for each in found]

    return prune_students


def test_a_frontier_without_a_reachable_pruned_speed_has_the_students_without_attention(prune):
    assert prune((), ("static", "gru")) == ["student-static", "student-gru"]
    assert prune(("2x",), ("static",)) == ["student-2x", "student-static"]


def test_a_frontier_without_any_student_is_rejected(prune):
    with pytest.raises(InputError, match="^budget.speedup 2,4: expected a speed .*, found none; 2x is too fast"):
        prune((), ())
