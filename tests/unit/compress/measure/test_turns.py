"""The order in which alternatives are timed, and what counts as their time."""

import time

import pytest

from compress.measure.turns import time_in_turns


def test_the_order_rotates_and_warmup_is_left_out():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in ("one", "other")}
    times = time_in_turns(steps, 3, warmup=1)
    assert order == ["one", "other", "other", "one"] * 2
    assert {name: len(seconds) for name, seconds in times.items()} == {"one": 3, "other": 3}


def test_what_comes_after_a_step_counts_and_what_comes_before_does_not(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    times = time_in_turns(
        {"step": lambda: spend(1.0)}, 2, warmup=0, before=lambda: spend(10.0), after=lambda: spend(0.5)
    )
    assert times["step"] == pytest.approx([1.5, 1.5])
