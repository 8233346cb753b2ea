"""Tests successive elimination of candidates: which continue, for how many steps, and which one wins."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pipelines.runs.console import Console
from pipelines.stages.prune.trials import eliminate_trials, plan_rounds


@dataclass
class Learner:
    """A candidate whose divergence falls from `start` by `rate` per step."""

    start: float
    rate: float
    turns: list[int] = field(default_factory=list)

    def run(self, steps: int) -> None:
        self.turns.append(steps)

    @property
    def module(self) -> SimpleNamespace:
        return SimpleNamespace(student=self)


class Comparison:
    """A comparison on one text, in place of one with a teacher."""

    def __len__(self) -> int:
        return 1

    def divergence(self, learner: Learner) -> float:
        return learner.start - learner.rate * sum(learner.turns)


def test_the_candidate_that_improves_fastest_wins():
    learners = [Learner(10.0, 0.001 * number) for number in (3, 9, 1, 7, 2, 8, 4, 6, 5, 0)]
    winner, divergences = eliminate_trials(learners, Comparison(), 90, Console())
    assert winner == 1
    assert learners[1].turns == [10, 30, 90]
    assert divergences[1] == pytest.approx([10 - 0.09, 10 - 0.36, 10 - 1.17])
    assert sorted(map(len, divergences)) == [1] * 6 + [2] * 2 + [3] * 2


def test_candidates_are_judged_after_training_and_not_by_their_start():
    slow, quick = Learner(1.0, 0.001), Learner(1.1, 0.01)
    assert eliminate_trials([slow, quick], Comparison(), 40, Console())[0] == 1
    assert slow.turns == quick.turns == [40]


@pytest.mark.parametrize(
    ("trials", "plan"),
    [
        (2, [(2, 450)]),
        (3, [(3, 450)]),
        (4, [(4, 150), (2, 450)]),
        (18, [(18, 50), (6, 150), (2, 450)]),
        (28, [(28, 16), (10, 50), (4, 150), (2, 450)]),
    ],
)
def test_rounds_get_longer_as_candidates_drop_out_at_bounded_total_cost(trials, plan):
    assert plan_rounds(trials, 450) == plan
    assert sum(count * steps for count, steps in plan_rounds(trials, 450)) <= 2 * 3 * 450


def test_every_round_has_at_least_one_step():
    assert plan_rounds(30, 2) == [(30, 1), (10, 1), (4, 1), (2, 2)]
