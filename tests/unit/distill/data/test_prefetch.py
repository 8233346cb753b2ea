"""Tests reading ahead: the same batches in the same order, errors at their turn, and no leftover thread."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from distill.data.batches.batches import TrainBatches
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Encoded
from distill.data.batches.prefetch import Prefetcher, WaitTimer
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import MaskedBlocks
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
    reader = iter(Prefetcher(lambda i: begun.append(i) or i, iter(range(100)), threads=2, depth=4))
    assert next(reader) == 0
    time.sleep(0.1)
    assert max(begun) == 4
    reader.close()  # type: ignore[attr-defined]
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


def test_waiting_counts_only_the_time_that_the_step_waits_for_a_batch():
    waiting = WaitTimer()
    consumer = iter(Prefetcher(lambda i: time.sleep(0.05) or i, range(6), threads=1, waiting=waiting))
    next(consumer)
    waiting.measure_share()
    for _ in consumer:
        time.sleep(0.1)  # the training step, long enough to prepare the next batch meanwhile
    assert waiting.measure_share() < 0.2
    slow = WaitTimer()
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


def test_a_data_module_reports_the_share_of_the_waiting_after_a_fit():
    rows = Recorded()
    module = RowsDataModule(rows, rows, batch_size=8, threads=0)
    for _ in module.train_dataloader():
        time.sleep(0.01)  # the step
    assert module.wait_share == 0
    module.teardown("fit")
    assert 0 < module.wait_share < 0.9


def test_the_share_of_all_waiting_includes_what_was_logged_before():
    waiting = WaitTimer()
    waiting.start -= 10
    waiting.add(4)
    waiting.measure_share()
    waiting.add(1)
    assert waiting.measure_total_share() == pytest.approx(0.5, abs=0.01)


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
