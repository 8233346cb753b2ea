"""Tests how a shape is corrected by measurements until it is as fast and as small as requested."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compress.prune.budget import TOLERANCE, Budget
from compress.prune.importance.estimate import score_by_magnitude
from compress.prune.search.allocate import Limit
from compress.prune.search.candidates import Candidate, SearchSpace, allocate_layers, get_sizes
from compress.prune.search.cost import CostModel, ModelSizes
from distill.errors import InputError
from distill.slicing import find_axes
from pipelines.runs.console import Console
from pipelines.settings.plan import SpeedTarget
from pipelines.stages.prune import shape_timing
from pipelines.stages.prune.shape import ShapeSearch
from pipelines.stages.prune.shape_timing import AIM, MeasuredChoice, ShapeTimer, TooLargeError
from support.tiny_models import build_model

# 1 + 0.01 per coordinate; per layer 0.1 + 0.2 per head + 0.01 per neuron; a small part also depends on the width
COSTS = CostModel((1.0, 0.01, 0.1, 0.0, 0.2, 0.001, 0.01, 0.0001), 0.0)
BYTES = CostModel((500.0, 300.0, 10.0, 4.0, 0.0, 32.0, 1.0, 2.0), 0.0)  # mostly the layers
LEAST, MOST = 3, 8  # measurements of a search


class SimulatedTimer(ShapeTimer):
    """A timer without files: calls take the predicted time, and files the predicted bytes, times a factor.

    Args:
        factors: Of the times on texts of each length, one for each measurement, repeated.
        byte_factor: Of the bytes.
    """

    def __init__(self, target: SpeedTarget, teacher_ms: float, factors: dict[int, list[float]], byte_factor: float = 1):
        budget = Budget(speedup="2", length=",".join(map(str, factors)))
        loaded: Any = SimpleNamespace(config=SimpleNamespace(budget=budget), run=SimpleNamespace(console=Console()))
        super().__init__(loaded, target, Path("no-scratch"))
        self.teacher_ms, self.byte_factor = teacher_ms, byte_factor
        self.factors = {length: cycle(each) for length, each in factors.items()}

    def build_candidate(self, candidate: Candidate) -> Any:
        return SimpleNamespace(bytes=self.byte_factor * BYTES.predict(candidate.sizes))

    def measure_length(self, length: int, candidate: Candidate, model: Any) -> dict:
        milliseconds = next(self.factors[length]) * COSTS.predict(candidate.sizes)
        speedup = self.teacher_ms / milliseconds
        return {
            "label": candidate.label,
            "length": length,
            "best_ms": milliseconds,
            "speedup": speedup,
            "bytes": model.bytes,
        }


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    model = build_model("bert")
    axes = find_axes(model)
    return SearchSpace(axes, score_by_magnitude(model, axes), [COSTS], 8)


@pytest.fixture
def teacher_ms(space, monkeypatch) -> float:
    """The predicted latency of the unpruned model; timers get the fixture's space."""
    monkeypatch.setattr(
        shape_timing,
        "build_space",
        lambda loaded, target: replace(space, size=Limit(BYTES, target.max_bytes) if target.max_bytes else None),
    )
    return COSTS.predict(get_sizes(space.axes))


def choose_first(
    space: SearchSpace, milliseconds: float, width: int = 24, layers: Sequence[int] = (0, 1, 3)
) -> Candidate:
    """Returns the candidate with which a search for a latency begins."""
    candidate = allocate_layers(space, width, layers, milliseconds / AIM)
    assert candidate is not None
    return candidate


def pooled_speedups(choice: MeasuredChoice) -> list[float]:
    return [each["pooled_speedup"] for each in choice.measurements]


@pytest.mark.parametrize("requested", ["speed-up", "latency"])
def test_a_shape_slower_than_predicted_is_made_smaller_until_it_is_fast_enough(requested, space, teacher_ms, capsys):
    allowed_ms = teacher_ms / 2
    target = SpeedTarget("2x", 2.0, 0.0) if requested == "speed-up" else SpeedTarget("slow", 0.0, allowed_ms)
    first = choose_first(space, allowed_ms)
    choice = SimulatedTimer(target, teacher_ms, {0: [1.2]}).correct_latency(first)
    assert len(choice.measurements) == LEAST
    assert pooled_speedups(choice)[0] == pytest.approx(2 * AIM / 1.2, rel=0.03)
    assert 2 * AIM <= pooled_speedups(choice)[-1] <= 2 * AIM * (1 + TOLERANCE / 2)
    assert 1.2 * COSTS.predict(choice.candidate.sizes) <= allowed_ms
    assert choice.corrected_ms == pytest.approx(allowed_ms / 1.2 / AIM)
    assert (choice.candidate.allocation.layers, choice.candidate.sizes.hidden) == (
        first.allocation.layers,
        first.sizes.hidden,
    )
    assert not choice.is_exhausted
    assert "missed" not in capsys.readouterr().out


def test_a_shape_faster_than_predicted_gets_more_units(space, teacher_ms):
    first = choose_first(space, teacher_ms / 3)
    choice = SimulatedTimer(SpeedTarget("3x", 3.0, 0.0), teacher_ms, {0: [0.8]}).correct_latency(first)
    assert len(choice.measurements) == LEAST
    assert pooled_speedups(choice)[-1] == pytest.approx(3 * AIM, rel=TOLERANCE / 2)
    assert COSTS.predict(choice.candidate.sizes) > 1.2 * COSTS.predict(first.sizes)


def test_the_speed_by_all_measurements_is_by_the_geometric_mean_of_their_deviations(space, teacher_ms):
    factors = [1.0, 2.0, 1.1, 1.4, 1.3, 0.9, 1.6, 1.2]
    timer = SimulatedTimer(SpeedTarget("2x", 2.0, 0.0), teacher_ms, {0: factors})
    choice = timer.correct_latency(choose_first(space, teacher_ms / 2))
    assert len(choice.measurements) > LEAST
    for number, each in enumerate(choice.measurements, 1):
        predicted = each["best_ms"] / factors[number - 1]
        mean = statistics.geometric_mean(factors[:number])
        assert each["pooled_speedup"] == pytest.approx(teacher_ms / (mean * predicted))


@pytest.mark.parametrize(
    ("factors", "count"),
    [
        ([1.2], LEAST),
        ([1.2, 1.2, 1.5, 1.29], 4),  # too slow by the first three, and the last is their mean
        ([1.2, 1.2, 0.9, 1.09], 4),  # too fast by the first three
        ([1.0, 1.5], MOST),  # the mean changes too much every time
    ],
)
def test_a_search_ends_at_the_requested_speed_after_three_to_eight_measurements(factors, count, space, teacher_ms):
    timer = SimulatedTimer(SpeedTarget("2x", 2.0, 0.0), teacher_ms, {0: factors})
    pooled = pooled_speedups(timer.correct_latency(choose_first(space, teacher_ms / 2)))
    assert len(pooled) == count
    *before, last = [each == pytest.approx(2 * AIM, rel=TOLERANCE / 2) for each in pooled[LEAST - 1 :]]
    assert not any(before)
    assert last == (count < MOST)


def test_a_search_ends_where_a_shape_with_all_units_is_faster_than_requested(space, teacher_ms):
    timer = SimulatedTimer(SpeedTarget("1.1x", 1.1, 0.0), teacher_ms, {0: [0.5]})
    choice = timer.correct_latency(choose_first(space, teacher_ms / 1.1, 32, range(4)))
    assert len(choice.measurements) == LEAST
    assert choice.candidate.sizes == get_sizes(space.axes)
    assert pooled_speedups(choice)[-1] == pytest.approx(2)
    assert not choice.is_exhausted


def test_the_slowest_of_several_lengths_decides(space, teacher_ms):
    timer = SimulatedTimer(SpeedTarget("2x", 2.0, 0.0), teacher_ms, {16: [0.9], 64: [1.3]})
    choice = timer.correct_latency(choose_first(space, teacher_ms / 2))
    assert {each["length"] for each in choice.measurements} == {64}
    assert pooled_speedups(choice)[-1] == pytest.approx(2 * AIM, rel=TOLERANCE / 2)
    assert 1.3 * COSTS.predict(choice.candidate.sizes) <= teacher_ms / 2


def test_a_target_that_no_shape_with_these_layers_and_width_reaches_is_exhausted(space, teacher_ms, capsys):
    first = choose_first(space, teacher_ms / 2)
    choice = SimulatedTimer(SpeedTarget("2x", 2.0, 0.0), teacher_ms, {0: [100]}).correct_latency(first)
    assert choice.is_exhausted
    assert choice.candidate == first
    assert len(choice.measurements) == LEAST
    assert pooled_speedups(choice) == pytest.approx([teacher_ms / COSTS.predict(first.sizes) / 100] * LEAST)
    assert "the target was missed" not in capsys.readouterr().out, "others are tried"


def test_the_smallest_shape_is_accepted_at_five_percent_below_the_requested_speed(space, teacher_ms, capsys):
    smallest = choose_first(space, AIM * COSTS.predict(ModelSizes(24, (1,) * 3, (1,) * 3)))
    for share, exhausted in ((0.96, False), (0.94, True)):
        factor = teacher_ms / 2 / share / COSTS.predict(smallest.sizes)
        choice = SimulatedTimer(SpeedTarget("2x", 2.0, 0.0), teacher_ms, {0: [factor]}).correct_latency(smallest)
        assert pooled_speedups(choice) == pytest.approx([2 * share] * LEAST)
        assert choice.is_exhausted is exhausted
        assert choice.candidate == smallest
    assert "missed" not in capsys.readouterr().out


def test_a_target_missed_on_a_machine_that_gets_slower_all_the_time_is_reported(space, teacher_ms, capsys):
    timer = SimulatedTimer(SpeedTarget("2x", 2.0, 0.0), teacher_ms, {0: [0.8 * 1.2**n for n in range(MOST)]})
    choice = timer.correct_latency(choose_first(space, teacher_ms / 2))
    assert len(choice.measurements) == MOST
    assert not choice.is_exhausted
    speedup = pooled_speedups(choice)[-1]
    assert speedup < 2 * (1 - TOLERANCE)
    assert f"the target was missed: {speedup:.2f}x, {speedup / 2:.0%} of the requested" in capsys.readouterr().out


def test_files_that_are_too_large_lose_units_until_they_fit(space, teacher_ms):
    first = choose_first(space, teacher_ms / 2)
    max_bytes = int(BYTES.predict(first.sizes))
    timer = SimulatedTimer(SpeedTarget("2x", 2.0, 0.0, max_bytes), teacher_ms, {0: [1.0]}, byte_factor=1.1)
    candidate, model = timer.fit_bytes(first)
    assert 0.97 * max_bytes <= model.bytes <= max_bytes
    assert (candidate.allocation.layers, candidate.sizes.hidden) == (first.allocation.layers, first.sizes.hidden)
    choice = timer.correct_latency(first)
    assert max(each["bytes"] for each in choice.measurements) <= max_bytes, "later shapes are no larger"
    assert pooled_speedups(choice)[-1] >= 2
    assert len(choice.measurements) == LEAST


def test_a_shape_that_gets_more_units_for_its_speed_still_fits_the_bytes(space, teacher_ms):
    first = choose_first(space, teacher_ms / 3)
    max_bytes = int(1.15 * BYTES.predict(first.sizes))
    timer = SimulatedTimer(SpeedTarget("3x", 3.0, 0.0, max_bytes), teacher_ms, {0: [0.8]}, byte_factor=1.1)
    choice = timer.correct_latency(first)
    assert COSTS.predict(choice.candidate.sizes) > COSTS.predict(first.sizes)
    assert 0.97 * max_bytes <= choice.measurements[-1]["bytes"] <= max_bytes
    assert pooled_speedups(choice)[-1] >= 3


def test_files_that_no_shape_with_these_layers_makes_small_enough_are_rejected(space, teacher_ms):
    first = choose_first(space, teacher_ms / 2)
    timer = SimulatedTimer(SpeedTarget("2x", 2.0, 0.0, 9000), teacher_ms, {0: [1.0]})
    with pytest.raises(InputError, match=r"budget.max_bytes: expected at most 0\.009 MB, found .* for the best shape"):
        timer.correct_latency(first)


class WideTimer(SimulatedTimer):
    """A timer of a search in which files of widths from 16 have more bytes than predicted."""

    MORE = 6000

    def build_candidate(self, candidate: Candidate) -> Any:
        more = self.MORE if candidate.sizes.hidden >= 16 else 0
        return SimpleNamespace(bytes=super().build_candidate(candidate).bytes + more)


class SimulatedSearch(ShapeSearch):
    """A search with a simulated timer, in which the widest candidate learns best."""

    def __init__(self, timer: SimulatedTimer, milliseconds: float):
        self.timer, self.target, self.console, self.milliseconds = timer, timer.target, timer.console, milliseconds
        self.widths: list[int] = []

    def run_trials(self, candidates: Sequence[Candidate]) -> tuple[int, list[list[float]]]:
        widest = max(range(len(candidates)), key=lambda number: candidates[number].sizes.hidden)
        self.widths.append(candidates[widest].sizes.hidden)
        return widest, [[] for _ in candidates]


def test_a_shape_whose_files_are_too_large_is_followed_by_others(space, teacher_ms, capsys):
    target = SpeedTarget("2x", 2.0, 0.0, 12_000)
    search = SimulatedSearch(WideTimer(target, teacher_ms, {0: [1.0]}), teacher_ms / 2)
    choice, trials = search.find_shape()
    assert (search.widths[0], choice.candidate.sizes.hidden) == (16, 8)
    assert choice.measurements[-1]["bytes"] <= 12_000
    assert not choice.is_exhausted
    assert len(trials) > len(search.widths), "of all searches"
    assert "for the best shape, width 16, layers 0:2x64, 3:2x64, at 2.4x; " in (printed := capsys.readouterr().out)
    assert "make it smaller; trying others" in printed


def test_files_that_are_too_large_are_reported_once_no_candidate_is_left(space, teacher_ms):
    target = SpeedTarget("2x", 2.0, 0.0, 12_000)
    timer = SimulatedTimer(target, teacher_ms, {0: [1.0]}, byte_factor=4)
    search = SimulatedSearch(timer, teacher_ms / 2)
    with pytest.raises(
        TooLargeError, match=r"budget.max_bytes: expected at most 0\.012 MB, found .* for the best shape"
    ):
        search.find_shape()
    assert timer.space.size.maximum < 12_000
