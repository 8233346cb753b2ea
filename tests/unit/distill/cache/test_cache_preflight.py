"""Tests the checks before a cache is written: forecasts, free disk space, and finite teacher outputs."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from distill.cache import CacheReader, Dense, Identity, Sampled, TopK, plan, preflight, write_cache
from distill.cache.preflight import Forecast
from distill.errors import InputError
from support.cache_samples import BATCH_TOKENS, IDENTITY, WORDS, Teacher, build_samples, files_of, make_rows, write
from support.clock import Clock

ROWS = make_rows()
KINDS = {
    "sampled": Sampled(width=WORDS, draws=6),
    "topk": TopK(width=WORDS, k=4),
    "logits": Dense(width=WORDS, each="position"),
    "classes": Dense(width=3, of="embedding"),
}


def size_of(folder: Path) -> int:
    return sum(map(len, files_of(folder).values()))


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_the_size_forecast_is_within_a_fifth_of_the_written_size(kind, compression, tmp_path, monkeypatch):
    signals = IDENTITY.signals if kind == "all" else (KINDS[kind],)
    identity, forecasts = Identity("t", "k", signals, compression=compression), []
    monkeypatch.setattr(plan, "SHARD_TOKENS", 4096)
    rows = make_rows(1000, seed=3)
    write_cache(
        tmp_path / "c", identity, build_samples(rows), Teacher(), batch_tokens=256, on_forecast=forecasts.append
    )
    (expected,) = forecasts
    assert (expected.samples, expected.tokens) == (len(rows), sum(map(len, rows)))
    assert 0.8 < expected.disk_bytes / size_of(tmp_path / "c") < 1.2


def test_the_forecast_for_a_growing_cache_covers_only_new_samples(tmp_path):
    forecasts: list[Forecast] = []
    for count in (40, 60, 60):
        before = size_of(tmp_path)
        write(tmp_path, ROWS[:count], identity=Identity("t", "k", (KINDS["logits"],)), on_forecast=forecasts.append)
    first, second = forecasts
    assert (first.samples, second.samples) == (40, 20), "a complete cache needs no forecast"
    assert 0.8 < second.disk_bytes / (before - first.disk_bytes) < 1.2


def test_the_time_forecast_is_that_of_all_tokens_without_the_start_of_the_first_batch(tmp_path, monkeypatch):
    forecasts: list[Forecast] = []
    clock, teacher = Clock(), Teacher()
    monkeypatch.setattr(preflight, "time", clock)

    def answer(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        clock.work(0.02 * int(batch["attention_mask"].sum()) + (0 if teacher.queried_keys else 5))
        return teacher(batch)

    write(tmp_path / "c", ROWS, answer, on_forecast=forecasts.append)
    assert forecasts[0].seconds == pytest.approx(0.02 * sum(map(len, ROWS)))
    assert forecasts[0].memory_bytes >= BATCH_TOKENS * WORDS * 4, "at least one answer of the teacher"


# --- a disk that is too small


@pytest.fixture
def ten_bytes_free(monkeypatch) -> None:
    monkeypatch.setattr("distill.cache.preflight.free_bytes", lambda folder: 10)


def test_a_cache_that_does_not_fit_is_rejected_before_anything_is_written(ten_bytes_free, tmp_path):
    with pytest.raises(InputError, match=r"GB for 60 samples, found 1e-08 GB free: the disk would be full"):
        write(tmp_path / "c", ROWS)
    assert size_of(tmp_path) == 0


def test_force_writes_the_cache_despite_too_little_space(ten_bytes_free, tmp_path):
    forecasts: list[Forecast] = []
    write(tmp_path / "c", ROWS, force=True, on_forecast=forecasts.append)
    assert forecasts[0].free_bytes == 10
    assert len(CacheReader(tmp_path / "c", IDENTITY)) == len(ROWS)


def test_growth_that_does_not_fit_leaves_the_cache_unchanged(tmp_path, monkeypatch):
    write(tmp_path / "c", ROWS[:30])
    before = files_of(tmp_path)
    monkeypatch.setattr("distill.cache.preflight.free_bytes", lambda folder: 10)
    with pytest.raises(InputError, match="GB for 30 samples"):
        write(tmp_path / "c", ROWS)
    assert files_of(tmp_path) == before
    assert write(tmp_path / "c", ROWS[:30]).queried_samples == 0, "a whole cache needs no room"


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Yields the mount point of a separate file system of 100 kB."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    arguments = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(mount_point)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"a file system of its own needs the right to mount: {result.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def test_a_full_disk_leaves_no_partial_file_and_writing_resumes_with_more_space(small_disk, tmp_path):
    identity = Identity("t", "k", (KINDS["logits"],))
    with pytest.raises(InputError, match="the disk would be full before the end"):
        write(small_disk / "c", ROWS, identity=identity)
    assert size_of(small_disk) == 0
    with pytest.raises(OSError, match="No space left"):
        write(small_disk / "c", ROWS, identity=identity, force=True)
    assert not list(small_disk.rglob("*.partial")), "half a file stayed on the full disk"
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert write(small_disk / "c", ROWS, identity=identity).reused_shards > 0, "what had been written was thrown away"
    write(tmp_path / "other", ROWS, identity=identity)
    assert files_of(small_disk / "c") == files_of(tmp_path / "other")


# --- outputs that are not finite


class NonFiniteTeacher(Teacher):
    """A teacher that puts `bad` into its output for one sample of id 7 only."""

    def __init__(self, name: str, bad: float):
        super().__init__()
        self.name, self.bad = name, bad

    def __call__(self, batch):
        output = super().__call__(batch)
        row = (batch["input_ids"] == 7).logical_or(batch["attention_mask"] == 0).all(1).nonzero()
        if len(row):
            output[self.name] = output[self.name].clone()
            output[self.name][row[0, 0], -1] = self.bad  # the last class, or every class at the last position
        return output


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_are_not_finite_are_rejected_before_anything_is_written(kind, bad, tmp_path):
    name = "embedding" if kind == "classes" else "logits"
    poisoned = np.full(16, 7)  # the longest sample is in the last batch, which is always measured
    identity = Identity("t", "k", (KINDS[kind],))
    message = f"teacher: expected finite {name}, found 1 of .* rows with NaN or infinity, the first is"
    with pytest.raises(InputError, match=message) as caught:
        write(tmp_path / "c", [*ROWS, poisoned], NonFiniteTeacher(name, bad), identity)
    if kind == "classes":
        assert build_samples([poisoned]).keys[0].hex() in str(caught.value)
    assert size_of(tmp_path) == 0, "found in the measured sample, before anything is written"


def test_a_late_non_finite_output_keeps_the_shards_already_written(tmp_path, monkeypatch):
    identity = Identity("t", "k", (KINDS["classes"],))
    monkeypatch.setattr("distill.cache.preflight.TIMED_BATCHES", 1)
    poisoned = np.full(15, 7)
    with pytest.raises(InputError, match=build_samples([poisoned]).keys[0].hex()):
        write(tmp_path / "c", [*ROWS, poisoned], NonFiniteTeacher("embedding", np.nan), identity)
    assert not list(tmp_path.rglob("*.partial"))
    assert write(tmp_path / "c", [*ROWS, poisoned], Teacher(), identity).reused_shards >= 3
    write(tmp_path / "other", [*ROWS, poisoned], Teacher(), identity)
    shards = [{n: b for n, b in files_of(tmp_path / name).items() if "shard" in n} for name in ("c", "other")]
    assert shards[0] == shards[1]


def test_an_output_of_another_width_is_rejected(tmp_path):
    def teacher(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"embedding": Teacher()(batch)["embedding"][:, :1]}

    with pytest.raises(InputError, match="expected embedding of width 3, found 1"):
        write(tmp_path / "c", ROWS, teacher, Identity("t", "k", (KINDS["classes"],)))
    assert size_of(tmp_path) == 0
