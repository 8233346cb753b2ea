"""Trainings under a real limit of the address space (RLIMIT_AS) end with the losses of an unlimited one."""

import pytest

from benchmarks.memory.memory_limits import Outcome, run_worker

pytestmark = pytest.mark.slow
BATCHES = 8


@pytest.fixture(scope="module")
def unlimited() -> Outcome:
    outcome = run_worker(BATCHES, "whole")
    assert outcome is not None
    assert (outcome.parts, len(outcome.losses)) == (1, BATCHES)
    return outcome


@pytest.mark.parametrize("split", ["whole", "auto"])
def test_a_training_under_a_limit_that_falls_twice_has_the_losses_of_an_unlimited_one(unlimited, split):
    limited = run_worker(BATCHES, split, {"0": int(0.8 * unlimited.peak), "5": int(0.45 * unlimited.peak)})
    assert limited is not None
    assert limited.parts >= 2
    assert limited.losses == pytest.approx(unlimited.losses, abs=1e-5)


def test_a_limit_before_the_training_is_found_by_the_probe(unlimited):
    limited = run_worker(BATCHES, "auto", {"-1": int(0.6 * unlimited.peak)})
    assert limited is not None
    assert limited.parts >= 2
    assert limited.losses == pytest.approx(unlimited.losses, abs=1e-5)
