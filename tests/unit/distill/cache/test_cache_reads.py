"""How often a cache's files are read: the index once, whatever the number of shards, epochs and processes."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from distill.cache import CacheReader
from distill.cache import faults as cache_faults
from distill.cache.faults import find_faults
from distill.cache.format.index import Index
from distill.cache.format.shard import Shard
from distill.cache.format.store import open_store, repair_files
from distill.cache.writer import fill_cache
from support.cache_samples import IDENTITY, Teacher, build_samples, files_of, make_rows, read_rows, write

ROWS = make_rows()
SHARDS = 5
INDEX = "index-000005.safetensors"
watched: list[Counter[str]] = []


def record_open(event: str, args: tuple) -> None:
    if event == "open" and watched and isinstance(args[0], str | Path):
        path = Path(args[0])
        if path.suffix not in (".json", ".safetensors"):
            return  # the compiled kernels that numba loads
        watched[-1][f"{'spare/' if path.parent.name == 'spare' else ''}{path.name}"] += 1


@pytest.fixture(scope="module", autouse=True)
def audit() -> None:
    sys.addaudithook(record_open)  # it can't be removed, and does nothing outside of `count_opens`


@contextmanager
def count_opens() -> Iterator[Counter[str]]:
    """Counts how often each file is opened, by name."""
    watched.append(Counter())
    yield watched[-1]
    watched.pop()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "cache"
    assert write(folder, ROWS, Teacher(whole_batch=True)).computed_shards == SHARDS
    return folder


def test_a_reader_opens_the_index_once_for_all_epochs(cache):
    with count_opens() as opened:
        reader = CacheReader(cache, IDENTITY)
        for _ in range(3):
            read_rows(reader, ROWS)
    assert opened == {"cache.json": 1, INDEX: 1, "codebook.safetensors": 1} | {
        f"shard-{number:06d}.safetensors": 1 for number in range(SHARDS)
    }


def test_a_writer_opens_the_index_of_a_complete_cache_once_to_check_and_once_to_map_it(cache):
    with count_opens() as opened:
        assert write(cache, ROWS).computed_shards == 0
    assert opened[INDEX] == 2
    assert opened[f"spare/{INDEX}"] == 1


def test_a_repair_hashes_each_file_once(cache):
    with count_opens() as opened:
        assert repair_files(cache) == []
    assert {opened[f"{folder}{name}"] for folder in ("", "spare/") for name in (INDEX, "codebook.safetensors")} == {1}


def test_the_entries_of_an_index_are_sorted_once_for_all_shards(cache, monkeypatch):
    sorts = []
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda *args, **more: sorts.append(len(args[0])) or argsort(*args, **more))
    store = open_store(cache)
    assert find_faults(store) == []
    assert sorts == [len(ROWS)]


def test_a_shards_prefixes_are_those_of_its_rows_in_order():
    rng = np.random.default_rng(0)
    sizes = (3, 0, 4, 1)
    places = np.concatenate([(number << 32) + np.arange(size) for number, size in enumerate(sizes)]).astype(np.uint64)
    keys = rng.integers(0, 256, (len(places), 16), dtype=np.uint8)
    index = Index.build(keys, places)
    prefixes = keys[:, :8].copy().view("<u8")[:, 0]
    firsts = np.cumsum([0, *sizes])
    for number, size in enumerate(sizes):
        assert index.shard_prefixes(number).tolist() == prefixes[firsts[number] : firsts[number] + size].tolist()
    assert not len(index.shard_prefixes(len(sizes)))


@pytest.fixture
def verified_shards(monkeypatch) -> list[int]:
    """Numbers of the shards whose bytes are checked completely."""
    numbers: list[int] = []
    original = Shard.find_damage

    def find_damage(self: Shard, prefixes: np.ndarray) -> list:
        numbers.append(int(self.path.stem.removeprefix("shard-")))
        return original(self, prefixes)

    monkeypatch.setattr(Shard, "find_damage", find_damage)
    return numbers


def test_writers_that_are_given_the_faults_check_no_shard_again(cache, tmp_path, verified_shards):
    folder = tmp_path / "cache"
    write(folder, ROWS, Teacher(whole_batch=True))
    (folder / "shard-000001.safetensors").unlink()
    flipped = folder / "shard-000003.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    store, samples = open_store(folder, IDENTITY), build_samples(ROWS)
    faults = find_faults(store)
    assert [(fault.number, fault.is_damage) for fault in faults] == [(1, False), (3, True)]
    verified_shards.clear()
    first = fill_cache(store, samples, Teacher(whole_batch=True), faults, rank=0, ranks=2)
    assert verified_shards == [3], "only to keep the damaged shard's intact records"
    verified_shards.clear()
    second = fill_cache(open_store(folder, IDENTITY), samples, Teacher(), faults, rank=1, ranks=2)
    assert not verified_shards
    assert (first.computed_shards, second.computed_shards, second.queried_samples) == (2, 0, 0)
    assert files_of(folder) == files_of(cache)


def test_a_shard_that_another_writer_published_is_recognized_by_its_time(cache, tmp_path):
    folder = tmp_path / "cache"
    write(folder, ROWS, Teacher(whole_batch=True))
    file = folder / "shard-000002.safetensors"
    intact = file.read_bytes()
    file.write_bytes(b"damaged")
    store = open_store(folder)
    (fault,) = find_faults(store)
    assert not cache_faults.is_published(store, fault)
    fresh, second = file.with_suffix(".new"), 10**9

    def publish(data: bytes, modified: int) -> None:
        fresh.write_bytes(data)
        os.utime(fresh, ns=(modified, modified))
        fresh.replace(file)

    publish(intact, fault.modified)
    assert not cache_faults.is_published(store, fault)
    publish(intact, fault.modified + second)
    assert cache_faults.is_published(store, fault)
    publish(b"still damaged", fault.modified + 2 * second)
    assert not cache_faults.is_published(store, fault), "its header can't be read"
