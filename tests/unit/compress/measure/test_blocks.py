"""Tests timing in blocks: who takes part in which block, and when it ends."""

from collections import Counter

import numpy as np
import pytest

from compress.measure.blocks import MAX_GROWTH, BlockTimes, Effort, TimedGroup, time_blocks
from compress.measure.interval import MIN_BLOCKS
from compress.measure.latency import TEXTS_PER_TURN
from support.timing import TimerHere

EFFORT = Effort(rounds=2, size=3, min_blocks=2, max_blocks=5, seconds=60.0)


def draw(number: int) -> dict[str, list[dict[str, np.ndarray]]]:
    texts = [{"input_ids": np.full((1, 4), 10 * number + text)} for text in range(3)]
    return dict.fromkeys(("teacher", "student", "other"), texts)


class Recorder:
    """Runners that record the block of each call."""

    def __init__(self) -> None:
        self.blocks: dict[str, Counter] = {name: Counter() for name in ("teacher", "student", "other")}

    def runner(self, name: str):
        def run(batch) -> None:
            self.blocks[name][int(batch["input_ids"][0, 0]) // 10] += 1

        return run

    def timer(self) -> TimerHere:
        return TimerHere({name: self.runner(name) for name in self.blocks})


def never(times) -> bool:
    return False


def test_a_settled_group_takes_no_part_in_further_blocks():
    calls = Recorder()
    groups = [
        TimedGroup(("teacher", "student"), lambda times: len(times["student"].times) == 3),
        TimedGroup(("other",), lambda times: True),
    ]
    timings = time_blocks(calls.timer(), groups, draw, EFFORT)
    assert {name: sorted(blocks) for name, blocks in calls.blocks.items()} == {
        "teacher": [0, 1, 2],
        "student": [0, 1, 2],
        "other": [0, 1],
    }
    assert timings["teacher"].fastest.shape == (3, 3)
    assert timings["other"].fastest.shape == (2, 3)


def test_unsettled_groups_are_timed_to_the_limit_of_blocks():
    timer = Recorder().timer()
    timings = time_blocks(timer, [TimedGroup(("teacher", "student", "other"), never)], draw, EFFORT)
    assert timer.openings == EFFORT.max_blocks
    assert all(each.fastest.shape == (EFFORT.max_blocks, 3) for each in timings.values())


def test_without_time_only_the_least_number_of_blocks_is_timed():
    effort = Effort(EFFORT.rounds, EFFORT.size, EFFORT.min_blocks, EFFORT.max_blocks, seconds=0.0)
    timings = time_blocks(Recorder().timer(), [TimedGroup(("teacher", "student", "other"), never)], draw, effort)
    assert len(timings["teacher"].times) == EFFORT.min_blocks


def test_a_summary_is_over_the_calls_of_all_blocks():
    times = BlockTimes(
        [np.array([[1.0, 9.0], [3.0, 2.0]]), np.array([[4.0, 6.0], [5.0, 5.0]])],
        [{"input_ids": np.zeros((1, length), np.int64)} for length in (3, 5, 7, 9)],
    )
    assert times.fastest.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    latency = times.summarize(threads=1)
    assert (latency.repeats, latency.best_ms, latency.median_ms, latency.length) == (8, 3.0, 4.5, 6)


@pytest.mark.parametrize(
    ("texts", "batch", "expected"),
    [
        (128, 1, (8, TEXTS_PER_TURN, 8)),
        (64, 1, (8, 11, 6)),
        (4, 1, (8, 1, MIN_BLOCKS)),
        (128, 32, (3, 32, MIN_BLOCKS)),
        (128, 4, (3, 16, 8)),
    ],
)
def test_the_planned_blocks_hold_at_least_the_requested_texts_and_are_enough_for_an_interval(texts, batch, expected):
    effort = Effort.plan(texts, 8, batch, 10.0)
    assert (effort.rounds, effort.size, effort.min_blocks) == expected
    assert effort.size * effort.min_blocks >= texts
    assert effort.size % batch == 0
    assert effort.max_blocks == MAX_GROWTH * effort.min_blocks
