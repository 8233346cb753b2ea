"""Tests the intervals of measured speeds: they contain the true value as often as they say, and narrow with blocks."""

import numpy as np
import pytest

from compress.errors import CompressError
from compress.measure.interval import MIN_BLOCKS, Estimate, estimate_median, estimate_ratio

RATIO = 10.0


def simulate(seed: int, blocks: int, calls: int = 8, rounds: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Returns the fastest times [blocks, calls] of a teacher and a student that is RATIO times as fast.

    Texts differ in length, the machine is slower in some blocks, for one model more than for the other, and a fifth of
    all calls is interrupted.
    """
    rng = np.random.default_rng(seed)
    work = rng.lognormal(0, 0.4, (blocks, 1, calls))
    shared = rng.lognormal(0, 0.1, (blocks, 1, 1))
    times = []
    for milliseconds in (RATIO, 1.0):
        model_speed = rng.lognormal(0, 0.03, (blocks, 1, 1))
        noise = 1 + rng.exponential(0.05, (blocks, rounds, calls))
        interrupted = np.where(rng.random((blocks, rounds, calls)) < 0.2, 1.5, 1.0)
        times.append((milliseconds * work * shared * model_speed * noise * interrupted).min(axis=1))
    return times[0], times[1]


@pytest.mark.parametrize("blocks", [MIN_BLOCKS, 12])
def test_intervals_contain_the_true_ratio_in_about_95_of_100_measurements(blocks):
    estimates = [estimate_ratio(*simulate(seed, blocks)) for seed in range(200)]
    covered = np.mean([each.low <= RATIO <= each.high for each in estimates])
    assert 0.91 <= covered <= 0.995
    assert np.median([each.value for each in estimates]) == pytest.approx(RATIO, rel=0.01)


def test_stopping_as_soon_as_the_interval_is_narrow_keeps_most_of_the_coverage():
    covered, counts = 0, []
    for seed in range(100):
        teacher, student = simulate(seed, 48)
        for blocks in range(MIN_BLOCKS, 49, 6):
            estimate = estimate_ratio(teacher[:blocks], student[:blocks])
            if estimate.width <= 0.08:
                break
        covered += estimate.low <= RATIO <= estimate.high
        counts.append(blocks)
    assert covered >= 87
    assert MIN_BLOCKS < np.median(counts) < 48


def test_more_blocks_narrow_the_interval_as_the_root_of_their_number():
    widths = {
        blocks: np.mean([estimate_ratio(*simulate(seed, blocks)).width for seed in range(30)]) for blocks in (16, 64)
    }
    assert widths[16] / widths[64] == pytest.approx(2, rel=0.2)


def test_an_exact_ratio_has_an_interval_without_width_whatever_the_lengths():
    student = np.random.default_rng(0).uniform(1, 5, (8, 4))
    estimate = estimate_ratio(4 * student, student)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((4, 4, 4))
    assert estimate_ratio(4 * student, student) == estimate, "the same times give the same interval"


def test_two_copies_of_a_model_have_an_interval_around_1():
    teacher, _ = simulate(3, 24)
    copy, _ = simulate(4, 24)
    estimate = estimate_ratio(teacher, copy)
    assert estimate.low < 1 < estimate.high


def test_a_latency_is_the_median_of_the_fastest_calls():
    _, student = simulate(5, 12)
    estimate = estimate_median(student)
    assert estimate.value == np.median(student)
    assert estimate_median(student[:, :7]).value == np.median(student[:, :7])
    assert estimate_median(student[:7, :7]).value == np.median(student[:7, :7]), "of an odd number of calls"
    assert estimate.low < estimate.value < estimate.high


def test_a_single_block_gives_an_unbounded_interval():
    teacher, student = simulate(0, 1)
    estimate = estimate_ratio(teacher, student)
    assert (estimate.low, estimate.high) == (0.0, float("inf"))
    assert estimate.width == float("inf")
    assert estimate.invert().low == 0


def test_an_estimate_is_scaled_and_inverted_with_its_interval():
    estimate = Estimate(2.0, 1.6, 2.5)
    assert estimate.scale(10) == Estimate(20.0, 16.0, 25.0)
    assert estimate.invert() == Estimate(0.5, 0.4, 0.625)


@pytest.mark.parametrize(
    ("teacher", "student", "message"),
    [
        (np.ones((3, 4)), np.ones((3, 5)), r"expected two arrays .* found \(3, 4\) and \(3, 5\)"),
        (np.ones(4), np.ones(4), r"expected two arrays \[blocks, calls\]"),
        (np.ones((3, 4)), np.zeros((3, 4)), "expected milliseconds above 0"),
        (np.ones((3, 4)), np.full((3, 4), np.nan), "expected milliseconds above 0"),
    ],
)
def test_times_of_different_texts_and_without_duration_are_rejected(teacher, student, message):
    with pytest.raises(CompressError, match=message):
        estimate_ratio(teacher, student)
