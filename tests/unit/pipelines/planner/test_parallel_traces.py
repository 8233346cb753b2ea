"""Traces in forked processes: the order of their results, what they may change, and their errors."""

import os

import pytest

from pipelines.planner.parallel_traces import map_in_processes


def test_results_come_in_the_order_of_the_items_from_other_processes():
    seen: list[int] = []
    factor = 3  # the function needn't be one that can be pickled
    results = list(map_in_processes(lambda item: (factor * item, os.getpid()), range(6), 2, seen.append))
    assert [result for result, _ in results] == [0, 3, 6, 9, 12, 15]
    assert seen == list(range(6))
    assert os.getpid() not in {process for _, process in results}


def test_one_process_or_one_item_needs_no_other():
    assert list(map_in_processes(lambda item: os.getpid(), [1, 2], 1)) == [os.getpid()] * 2
    assert list(map_in_processes(lambda item: os.getpid(), [1], 4)) == [os.getpid()]


def test_an_error_in_another_process_is_raised_here():
    with pytest.raises(ValueError, match="item 2"):
        list(map_in_processes(lambda item: int(f"item {item}"), [2, 3], 2))
