"""Tests reading ahead: the same batches in the same order, errors at their turn, and no leftover thread."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from distill.data.batches import prefetch
from distill.data.batches.batches import TrainBatches
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Encoded
from distill.data.batches.prefetch import Prefetcher, WaitTimer
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import MaskedBlocks
from distill.errors import InputError
from support.clock import Clock

SECONDS = 60  # that a thread may take before a test fails


@pytest.fixture
def clock(monkeypatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(prefetch, "time", fake)
    return fake


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
    requested: list[int] = []
    begun = threading.Semaphore(0)

    def request() -> Iterator[int]:
        for i in range(100):
            requested.append(i)
            yield i

    reader = iter(Prefetcher(lambda i: begun.release() or i, request(), threads=2, depth=4))
    assert next(reader) == 0
    assert requested == [0, 1, 2, 3, 4]
    assert all(begun.acquire(timeout=SECONDS) for _ in requested), "they are not processed before their turn"
    reader.close()  # type: ignore[attr-defined]
    assert requested == [0, 1, 2, 3, 4]
    assert not workers()


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_is_raised_at_its_own_turn(threads):
    def make(i: int) -> int:
        if i == 3:
            raise InputError("sample 3 is damaged")
        return i

    reader = iter(Prefetcher(make, range(10), threads=threads))
    assert [next(reader) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InputError, match="sample 3"):
        next(reader)
    assert not workers()


def test_a_batch_that_is_ready_before_its_turn_is_not_waited_for(clock):
    made = threading.Semaphore(0)

    def make(i: int) -> int:
        clock.work(3)
        made.release()
        return i

    waiting = WaitTimer()
    consumer = iter(Prefetcher(make, range(6), threads=1, depth=1, waiting=waiting))
    assert next(consumer) == 0
    assert made.acquire(timeout=SECONDS)
    waiting.measure_share()
    for expected in range(1, 6):
        assert made.acquire(timeout=SECONDS)  # the training step, which ends when the next batch is ready
        assert next(consumer) == expected
    assert waiting.measure_share() == 0
    assert not list(consumer)


def test_the_wait_for_a_batch_that_is_not_ready_is_counted(clock, monkeypatch):
    finish, waiting = Future.result, WaitTimer()
    monkeypatch.setattr(Future, "result", lambda future: clock.work(3) or finish(future))
    for _ in Prefetcher(lambda i: i, range(6), threads=1, waiting=waiting):
        clock.work(1)  # the training step
    assert waiting.measure_share() == 3 / 4


def test_a_batch_that_is_made_on_request_is_waited_for(clock):
    waiting = WaitTimer()
    for _ in Prefetcher(lambda i: clock.work(3) or i, range(6), threads=0, waiting=waiting):
        clock.work(1)
    assert waiting.measure_share() == 3 / 4


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
    read_labels = [batch["labels"].tolist() for batch, _ in zip(stopped, range(2), strict=False)]
    # zip requests a third batch before it checks the range, as a run that is killed during that batch would.
    resumed = TrainBatches(data(), 8, 0, seed=3, signals=signals, threads=threads)
    resumed.load_state_dict({"position": 2})
    rest = labels(iter(resumed)) + labels(iter(resumed))
    assert read_labels + rest == everything
    assert stopped.state_dict()["position"] in (2, 3)


class Recorded:
    """Rows that record the threads on which they are collated."""

    def __init__(self, rows: int = 40):
        self.rows, self.threads = data(rows), set[str]()
        self.lengths = self.rows.lengths

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, rows: np.ndarray, pad_id: int, epoch: int = 0) -> dict[str, torch.Tensor]:
        self.threads.add(threading.current_thread().name)
        return self.rows.collate(rows, pad_id, epoch)


def test_a_data_module_without_signals_collates_ahead_of_the_step():
    rows = Recorded()
    module = RowsDataModule(rows, rows, batch_size=8, seed=3)
    found = list(module.train_dataloader())
    assert len(found) == 5
    assert all(name.startswith("ahead") for name in rows.threads)
    expected = TrainBatches(rows.rows, 8, 0, seed=3)
    for batch, plain in zip(found, expected, strict=True):
        assert batch.keys() == plain.keys()
        assert all(torch.equal(batch[name], value) for name, value in plain.items())


def test_a_data_module_reports_the_share_of_the_waiting_after_a_fit(clock, monkeypatch):
    rows = Recorded()
    collate = rows.collate
    monkeypatch.setattr(rows, "collate", lambda *args: clock.work(1) or collate(*args))
    module = RowsDataModule(rows, rows, batch_size=8, threads=0)
    for _ in module.train_dataloader():
        clock.work(3)
    assert module.wait_share == 0
    module.teardown("fit")
    assert module.wait_share == 1 / 4


def test_the_share_of_all_waiting_includes_what_was_logged_before(clock):
    waiting = WaitTimer()
    clock.work(10)
    waiting.add(4)
    assert waiting.measure_share() == 0.4
    clock.work(10)
    waiting.add(1)
    assert waiting.measure_share() == 0.1
    assert waiting.measure_total_share() == 5 / 20


def test_masked_rows_collated_on_several_threads_equal_those_of_one_process():
    rng = np.random.default_rng(1)
    blocks = LanguageBlocks([rng.integers(5, 200, 12) for _ in range(60)])
    masked = MaskedBlocks(blocks, MaskConfig(), 4, 200, (0, 1, 2, 3, 4))
    plain, ahead = TrainBatches(masked, 4, 0, seed=3), TrainBatches(masked, 4, 0, seed=3, threads=3)
    for _ in range(2):  # epochs, whose masks differ
        for expected, found in zip(plain, ahead, strict=True):
            assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_batches_for_a_gpu_are_pinned_with_their_nested_signals():
    def nested(batch: dict[str, torch.Tensor]) -> dict[str, object]:
        return {"logits": torch.ones(2), "hidden": {3: torch.ones(2)}, "ids": [torch.ones(2)]}

    batches = TrainBatches(data(), 8, 0, seed=3, signals=nested, threads=1, pinned_for=torch.device("cuda", 0))
    batch = next(iter(batches))
    batch_signals = batch.pop("signals")
    assert all(value.is_pinned() for value in batch.values())
    assert batch_signals["logits"].is_pinned()
    assert batch_signals["hidden"][3].is_pinned()
    assert batch_signals["ids"][0].is_pinned()
