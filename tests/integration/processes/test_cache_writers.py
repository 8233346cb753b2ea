"""Concurrent and killed writer processes leave the same cache as one undisturbed writer."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest

from distill.cache import CacheReader
from distill.cache.verify import verify_cache
from distill.errors import InputError
from support.cache_samples import Teacher, files_of, make_rows, start_writer, write
from support.processes.forking import fork_server

ROWS = make_rows()
FIRST = 20  # rows of a cache that is later extended to all rows
SHARDS = 5
PAUSE = 0.02
SECONDS = 120.0  # for everything that is waited for


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    fork_server()


@pytest.fixture(scope="module")
def single_writer_cache(tmp_path_factory) -> Path:
    """A cache written by one undisturbed writer."""
    folder = tmp_path_factory.mktemp("alone") / "cache"
    assert write(folder, ROWS, Teacher(whole_batch=True)).computed_shards == SHARDS
    return folder


@pytest.fixture(scope="module")
def grown_cache(tmp_path_factory) -> Path:
    """A cache that one writer fills with FIRST rows, then with all rows."""
    folder = tmp_path_factory.mktemp("grown") / "cache"
    for count in (FIRST, len(ROWS)):
        write(folder, ROWS[:count], Teacher(whole_batch=True))
    return folder


class MeetingTeacher(Teacher):
    """A teacher that waits in its first query for a shard until as many writers as `count` are in theirs.

    Queries before `begins` is set, from the planning, don't wait: one writer plans while the others wait for it.
    """

    def __init__(self, gate: Path, count: int):
        super().__init__(whole_batch=True, pause=PAUSE)
        self.gate, self.count, self.begins = gate, count, False

    def __call__(self, batch):
        if self.begins:
            (self.gate / str(os.getpid())).touch()
            wait_until(lambda: len(list(self.gate.iterdir())) >= self.count, "other writers")
        return super().__call__(batch)

    def begin(self, _: int) -> None:
        self.begins = True


def write_beside_others(send: Connection, folder: Path, gate: Path, rank: int, count: int) -> None:
    teacher = MeetingTeacher(gate, count)
    send.send(write(folder, ROWS, teacher, rank=rank, ranks=count, on_progress=teacher.begin))


def start_beside_others(folder: Path, rank: int, count: int) -> tuple[ForkServerProcess, Connection]:
    """Starts a writer that holds its first shard until `count` writers hold one; each leaves a file in `gate_of`."""
    gate_of(folder).mkdir(exist_ok=True)
    ours, theirs = fork_server().Pipe(duplex=False)
    process = fork_server().Process(target=write_beside_others, args=(theirs, folder, gate_of(folder), rank, count))
    process.start()
    theirs.close()
    return process, ours


def gate_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-gate")


def wait_until(condition: Callable[[], object], what: str, alive: Sequence[ForkServerProcess] = ()) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert all(process.is_alive() for process in alive), f"a writer ended before there were {what}"
        assert time.monotonic() < until, f"no {what} within {SECONDS:.0f} s"
        time.sleep(0.005)


def receive(pipe: Connection):
    assert pipe.poll(SECONDS), "a writer takes too long"
    return pipe.recv()


def finish(process: ForkServerProcess) -> None:
    """Waits for the end of a writer, which must be without an error."""
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0


def write_at_once(folder: Path, ranks: list[int]) -> list:
    """Runs one writer per rank concurrently, so that each computes a shard, and returns what each one returned."""
    writers = [start_beside_others(folder, rank, len(ranks)) for rank in ranks]
    results = [receive(pipe) for _, pipe in writers]
    for process, _ in writers:
        finish(process)
    return results


def check_ends_alike(folder: Path, expected: Path, rows=ROWS) -> None:
    write(folder, rows, Teacher(whole_batch=True))
    assert files_of(folder) == files_of(expected)
    assert verify_cache(folder) == []


# --- concurrent writers


def test_four_concurrent_writers_write_the_same_cache_as_one(single_writer_cache, tmp_path):
    results = write_at_once(tmp_path / "four", [0, 1, 2, 3])
    assert files_of(tmp_path / "four") == files_of(single_writer_cache)
    assert sum(written.computed_shards for written in results) == SHARDS
    assert sum(written.queried_samples for written in results) == len(ROWS), "a sample was queried twice"


@pytest.mark.parametrize("ranks", [[0, 1], [0, 0]])
def test_two_writers_of_one_folder_share_the_work(ranks, single_writer_cache, tmp_path):
    first, second = write_at_once(tmp_path / "two", ranks)
    assert files_of(tmp_path / "two") == files_of(single_writer_cache)
    assert first.computed_shards + second.computed_shards == first.computed_shards + first.reused_shards == SHARDS
    assert min(first.computed_shards, second.computed_shards) >= 1, "one of them only waited"
    assert first.queried_samples + second.queried_samples == len(ROWS)


def test_two_writers_repair_a_damaged_cache_to_its_original_bytes(single_writer_cache, tmp_path):
    folder = shutil.copytree(single_writer_cache, tmp_path / "cache")
    (folder / "shard-000001.safetensors").unlink()
    file = folder / "shard-000003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    (folder / "codebook.safetensors").unlink()
    results = write_at_once(folder, [0, 1])
    assert sum(written.computed_shards for written in results) == 2
    assert files_of(folder) == files_of(single_writer_cache)


def test_an_open_reader_keeps_its_rows_while_the_cache_grows(grown_cache, tmp_path):
    folder = tmp_path / "cache"
    write(folder, ROWS[:FIRST], Teacher(whole_batch=True))
    before = files_of(folder)
    reader = CacheReader(folder)
    process, _ = start_writer(folder, ROWS, PAUSE)
    until = time.monotonic() + SECONDS
    while process.is_alive() and time.monotonic() < until:
        assert reader.contains([reader.open_shard(0).keys[0].tobytes()]).all()
        assert not reader.open_shard(0).find_damage(reader.store.index.shard_prefixes(0))
    finish(process)
    after = files_of(folder)
    assert {name: after[name] for name in before if "shard-" in name} == {
        name: data for name, data in before.items() if "shard-" in name
    }
    assert after == files_of(grown_cache)


# --- killed writers


def kill_at_random(folder: Path, seed: int, longest: float) -> None:
    """Starts a writer and kills it within `longest` seconds, roughly the time an undisturbed writer needs."""
    rng = np.random.default_rng(seed)
    process, pipe = start_writer(folder, ROWS, PAUSE)
    assert receive(pipe) == "ready"
    time.sleep(rng.uniform(0, longest))
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)


def check_killed(seed: int, single_writer_cache: Path, grown_cache: Path, folder: Path) -> None:
    """The seed selects a fresh, a growing or a damaged cache; writers with odd seeds are killed twice."""
    expected = grown_cache if seed % 3 == 1 else single_writer_cache
    if seed % 3 == 1:
        write(folder, ROWS[:FIRST], Teacher(whole_batch=True))
    elif seed % 3 == 2:
        shutil.copytree(single_writer_cache, folder)
        for number in (0, 2, 3):
            (folder / f"shard-{number:06d}.safetensors").write_bytes(b"damaged")
    for again in range(1 + seed % 2):
        kill_at_random(folder, 2 * seed + again, (0.6, 0.5, 0.3)[seed % 3])
    check_ends_alike(folder, expected)


@pytest.mark.parametrize("seed", range(3))
def test_the_cache_of_a_killed_writer_is_completed_identically(seed, single_writer_cache, grown_cache, tmp_path):
    check_killed(seed, single_writer_cache, grown_cache, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 53))
def test_the_caches_of_fifty_killed_writers_are_completed_identically(seed, single_writer_cache, grown_cache, tmp_path):
    check_killed(seed, single_writer_cache, grown_cache, tmp_path / "cache")


def test_a_killed_writer_does_not_stop_the_other_writer(single_writer_cache, tmp_path):
    folder = tmp_path / "cache"
    victim, _ = start_beside_others(folder, 0, 2)  # waits with a shard for a second one that never comes
    wait_until(lambda: list(gate_of(folder).iterdir()), "queries", [victim])
    other, pipe = start_writer(folder, ROWS, 0.0)
    wait_until(lambda: len(list(folder.glob("shard-*.safetensors"))) == SHARDS - 1, "other shards", [victim, other])
    victim.kill()
    victim.join()
    assert [receive(pipe), receive(pipe).samples] == ["ready", len(ROWS)]
    finish(other)
    assert files_of(folder) == files_of(single_writer_cache)


@pytest.mark.parametrize("missing", [True, False])
def test_leftovers_of_a_killed_writer_are_removed(missing, single_writer_cache, tmp_path):
    folder = shutil.copytree(single_writer_cache, tmp_path / "cache")
    if missing:
        (folder / "shard-000002.safetensors").unlink()
    left = ["shard-000002.partial", "cache.json.4711.partial", "spare/cache.json.4711.partial"]
    left += ["index-000005.safetensors.4711.partial", "spare/codebook.safetensors.4711.partial"]
    for name in left:
        (folder / name).write_bytes(b"half a fi")
    (folder / "index-000009.safetensors").write_bytes(b"of a growth that was never ended")
    check_ends_alike(folder, single_writer_cache)


# --- writers stopped by an error


class StoppingTeacher(Teacher):
    """A teacher that raises an error after `last` batches."""

    def __init__(self, last: int):
        super().__init__(whole_batch=True)
        self.left = last

    def __call__(self, batch):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the teacher stopped")
        return super().__call__(batch)


@pytest.mark.parametrize("batches", range(0, 25, 3))
def test_a_write_stopped_by_an_error_is_completed_identically(batches, single_writer_cache, tmp_path):
    with pytest.raises(RuntimeError, match="the teacher stopped"):
        write(tmp_path / "cache", ROWS, StoppingTeacher(batches))
    assert not list((tmp_path / "cache").rglob("*.partial"))
    with pytest.raises(InputError, match=r"missing"):
        CacheReader(tmp_path / "cache")
    check_ends_alike(tmp_path / "cache", single_writer_cache)


def test_a_full_disk_leaves_no_partial_shard(single_writer_cache, tmp_path, monkeypatch):
    def full(_: int) -> None:
        if list((tmp_path / "cache").glob("shard-*.partial")):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path / "cache", ROWS, Teacher(whole_batch=True))
    assert not list((tmp_path / "cache").glob("shard-*"))
    check_ends_alike(tmp_path / "cache", single_writer_cache)
