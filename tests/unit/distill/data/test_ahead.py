"""Tests reading ahead: the same batches in the same order, errors at their turn, and no leftover thread."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from distill.data.batches.batches import TrainBatches
from distill.data.batches.encode import Encoded
from distill.data.batches.read_ahead import Prefetcher, Waiting
from distill.errors import InputError


def data(rows: int = 40) -> Encoded:
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 200, rng.integers(2, 12)) for _ in range(rows)]
    return Encoded(ids, None, np.arange(rows), 0)


def signals(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"logits": batch["input_ids"].sum(1, keepdim=True).float()}


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_the_order_is_independent_of_the_number_of_threads(threads):
    def slow_at_first(i: int) -> int:
        time.sleep(0.02 if i % 3 == 0 else 0)
        return i * i

    assert list(Prefetcher(slow_at_first, range(20), threads=threads)) == [i * i for i in range(20)]
    assert not workers()


def test_no_more_is_read_ahead_than_the_requested_depth():
    begun: list[int] = []
    made = iter(Prefetcher(lambda i: begun.append(i) or i, iter(range(100)), threads=2, depth=4))
    assert next(made) == 0
    time.sleep(0.1)
    assert max(begun) == 4
    made.close()  # type: ignore[attr-defined]
    assert not workers()


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_is_raised_at_its_own_turn(threads):
    def make(i: int) -> int:
        if i == 3:
            raise InputError("sample 3 is damaged")
        return i

    made = iter(Prefetcher(make, range(10), threads=threads))
    assert [next(made) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InputError, match="sample 3"):
        next(made)
    assert not workers()


def test_waiting_counts_only_the_time_that_the_step_waits_for_a_batch():
    waiting = Waiting()
    consumer = iter(Prefetcher(lambda i: time.sleep(0.05) or i, range(6), threads=1, waiting=waiting))
    next(consumer)
    waiting.measure_share()
    for _ in consumer:
        time.sleep(0.1)  # the training step, long enough to prepare the next batch meanwhile
    assert waiting.measure_share() < 0.2
    slow = Waiting()
    for _ in Prefetcher(lambda i: time.sleep(0.05) or i, range(6), threads=0, waiting=slow):
        pass
    assert slow.measure_share() > 0.8


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_batches_read_ahead_equal_plain_batches(threads):
    plain = TrainBatches(data(), 8, 0, seed=3)
    ahead = TrainBatches(data(), 8, 0, seed=3, signals=signals, threads=threads)
    for expected, found in zip(plain, ahead, strict=True):
        computed = found.pop("signals")
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert torch.equal(computed["logits"], signals(expected)["logits"])


@pytest.mark.parametrize("threads", [0, 2])
def test_a_resumed_reader_does_not_skip_batches_that_were_only_read_ahead(threads):
    def labels(batches: Iterator) -> list[list[int]]:
        return [batch["labels"].tolist() for batch in batches]

    whole = TrainBatches(data(), 8, 0, seed=3, signals=signals, threads=threads)
    everything = labels(iter(whole)) + labels(iter(whole))
    stopped = TrainBatches(data(), 8, 0, seed=3, signals=signals, threads=threads)
    seen = [batch["labels"].tolist() for batch, _ in zip(stopped, range(2), strict=False)]
    # zip requests a third batch before it checks the range, as a run that is killed during that batch would.
    resumed = TrainBatches(data(), 8, 0, seed=3, signals=signals, threads=threads)
    resumed.load_state_dict({"position": 2})
    rest = labels(iter(resumed)) + labels(iter(resumed))
    assert seen + rest == everything
    assert stopped.state_dict()["position"] in (2, 3)
