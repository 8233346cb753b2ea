"""Tests damaged caches: no wrong row is served, the damage is named, and rewriting repairs only the damage."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distill.cache import CacheReader
from distill.cache.format.shard import Shard
from distill.cache.format.store import open_store
from distill.cache.plan import group_batches
from distill.cache.verify import verify_cache
from distill.errors import InputError
from support.cache_samples import BATCH_TOKENS, IDENTITY, Teacher, equal, files_of, keys_of, make_rows, read_rows, write

ROWS = make_rows()
ROW_OF = dict(zip(keys_of(ROWS), ROWS, strict=True))
SHARDS = 5
INDEX = f"index-{SHARDS:06d}.safetensors"
SINGLE = (INDEX, "codebook.safetensors", "cache.json")  # files that have a spare copy


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "cache"
    assert write(folder, ROWS, Teacher(whole_batch=True)).computed_shards == SHARDS
    return folder


@pytest.fixture(scope="module")
def truth(original) -> list[dict[str, np.ndarray]]:
    reader = CacheReader(original, IDENTITY)
    return [read_rows(reader, [row]) for row in ROWS]


@pytest.fixture
def cache(original, tmp_path) -> Path:
    return shutil.copytree(original, tmp_path / "cache")


@pytest.fixture(scope="module")
def shards(original) -> list[Shard]:
    store = open_store(original)
    return [Shard(original, number, rows, store.identity) for number, rows in enumerate(store.shard_rows)]


def batch_of(shard: Shard, row: int) -> set[bytes]:
    """Returns the keys of the samples in the same teacher batch as a shard's row."""
    keys = [key.tobytes() for key in shard.keys]
    batches = group_batches([len(ROW_OF[key]) for key in keys], BATCH_TOKENS)
    return {keys[i] for batch in batches if row in batch for i in batch}


def check_no_wrong_row(folder: Path, truth: list[dict[str, np.ndarray]]) -> int:
    """Checks that every served row is exactly right and returns the number of rejected samples."""
    try:
        reader = CacheReader(folder, IDENTITY)
    except InputError:
        return len(ROWS)
    rejected = 0
    for row, expected in zip(ROWS, truth, strict=True):
        try:
            assert equal(read_rows(reader, [row]), expected), "a wrong row was served"
        except InputError:
            rejected += 1
    return rejected


def faulty(folder: Path) -> set[str]:
    """Returns the files in which `verify` finds faults."""
    try:
        return {fault.file for fault in verify_cache(folder)}
    except InputError as error:
        return {name for name in SINGLE if name in str(error)}


def check_repaired(folder: Path, original: Path) -> set[bytes]:
    """Rewrites the cache, checks that it equals the original, and returns the keys queried from the teacher."""
    teacher = Teacher(whole_batch=True)
    written = write(folder, ROWS, teacher)
    assert files_of(folder) == files_of(original), "the repaired cache differs from the first"
    assert written.queried_samples == len(teacher.queried_keys)
    assert faulty(folder) == set()
    return set(teacher.queried_keys)


def flip_bits(file: Path, offset: int, bits: int = 0x20) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= bits
    file.write_bytes(data)


def test_an_undamaged_cache_has_no_faults(cache, original, truth):
    assert verify_cache(cache) == []
    assert check_no_wrong_row(cache, truth) == 0
    assert check_repaired(cache, original) == set()


@pytest.mark.parametrize("seed", range(50))
def test_a_flipped_byte_is_located_and_repaired_and_never_served(seed, cache, original, truth, shards):
    rng = np.random.default_rng(seed)
    names = sorted(name for name, data in files_of(cache).items() if data)
    sizes = np.array([(cache / name).stat().st_size for name in names])
    # With even seeds, small files are as likely as large ones.
    weights = sizes / sizes.sum() if seed % 2 else np.full(len(names), 1 / len(names))
    name = names[rng.choice(len(names), p=weights)]
    offset = int(rng.integers((cache / name).stat().st_size))
    flip_bits(cache / name, offset, int(rng.integers(1, 256)))
    check_no_wrong_row(cache, truth)
    assert faulty(cache) == {name}
    queried = check_repaired(cache, original)
    if not name.startswith("shard-"):
        assert queried == set(), "the teacher has no part in this file"
        return
    shard = shards[int(name[6:12])]
    assert queried <= {key.tobytes() for key in shard.keys}
    for signal, (first, last) in shard.ranges.items():
        if signal.endswith(".payload") and first <= offset < last:
            ends = shard.signals[signal.removesuffix(".payload")][1]
            row = int(np.searchsorted(ends, offset - first, side="right"))
            assert queried == batch_of(shard, row), (
                "samples of undamaged batches were queried, or damaged ones were not"
            )


@pytest.mark.parametrize("signal", [signal.name for signal in IDENTITY.signals])
@pytest.mark.parametrize("edge", ["first", "last"])
def test_a_changed_payload_byte_is_traced_to_exactly_one_sample(signal, edge, cache, original, truth, shards):
    shard, row = shards[2], 3
    first, last = shard.record_range(row, signal)
    offset = shard.ranges[f"{signal}.payload"][0] + (first if edge == "first" else last - 1)
    flip_bits(cache / shard_name(2), offset)
    (fault,) = verify_cache(cache)
    assert (fault.file, fault.end - fault.start) == (shard_name(2), last - first)
    assert fault.start <= offset < fault.end
    assert fault.samples == (shard.keys[row].tobytes().hex(),)
    assert check_no_wrong_row(cache, truth) == 1
    assert check_repaired(cache, original) == batch_of(shard, row)


@pytest.mark.parametrize("byte", [0, 9])
def test_a_changed_key_is_detected_and_repaired(byte, cache, original, truth, shards):
    shard, row = shards[1], 4
    offset = shard.ranges["keys"][0] + 16 * row + byte
    flip_bits(cache / shard_name(1), offset)
    known = shard.keys[row].tobytes().hex()[:16]  # the index stores only these bytes of a key
    assert all(name.startswith(known) for fault in verify_cache(cache) for name in fault.samples)
    assert check_no_wrong_row(cache, truth) == 1
    assert check_repaired(cache, original) == batch_of(shard, row)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, 0.5, -1, "longer"])
def test_a_truncated_or_extended_shard_is_detected_and_repaired(length, cache, original, truth, shards):
    file = cache / shard_name(3)
    data = file.read_bytes()
    cut = int(len(data) * length) if isinstance(length, float) else length
    file.write_bytes(data + b"\0" if cut == "longer" else data[:cut])
    check_no_wrong_row(cache, truth)
    assert faulty(cache) == {shard_name(3)}
    queried = check_repaired(cache, original)
    assert queried == (set() if cut == "longer" else {key.tobytes() for key in shards[3].keys})


def test_deleted_shards_are_named_and_only_their_samples_are_recomputed(cache, original, shards):
    for number in (0, 3):
        (cache / shard_name(number)).unlink()
    with pytest.raises(InputError) as caught:
        CacheReader(cache, IDENTITY)
    assert [i for i in range(SHARDS) if shard_name(i) in str(caught.value)] == [0, 3]
    faults = verify_cache(cache)
    assert [fault.file for fault in faults] == [shard_name(0), shard_name(3)]
    for fault, shard in zip(faults, (shards[0], shards[3]), strict=True):
        assert fault.samples == tuple(key.tobytes()[:8].hex() for key in shard.keys)
    assert check_repaired(cache, original) == {key.tobytes() for i in (0, 3) for key in shards[i].keys}


def test_swapped_shards_are_rejected_and_repaired(cache, original, truth, shards):
    first, second = (cache / shard_name(0)).read_bytes(), (cache / shard_name(4)).read_bytes()
    (cache / shard_name(0)).write_bytes(second)
    (cache / shard_name(4)).write_bytes(first)
    assert check_no_wrong_row(cache, truth) == shards[0].rows + shards[4].rows
    assert faulty(cache) == {shard_name(0), shard_name(4)}
    check_repaired(cache, original)


def test_a_shard_of_another_teacher_is_rejected_and_repaired(cache, original, truth, shards, tmp_path):
    other = tmp_path / "other"
    write(other, ROWS, Teacher(), replace(IDENTITY, teacher="teacher-b"))
    shutil.copy(other / shard_name(1), cache)
    assert check_no_wrong_row(cache, truth) == shards[1].rows
    assert faulty(cache) == {shard_name(1)}
    check_repaired(cache, original)


def test_a_shard_of_other_samples_by_the_same_teacher_is_rejected_and_repaired(
    cache, original, truth, shards, tmp_path
):
    other = tmp_path / "other"
    write(other, [(row + 1) % 90 for row in ROWS], Teacher())
    shutil.copy(other / shard_name(1), cache)
    assert check_no_wrong_row(cache, truth) == shards[1].rows
    named = {name for fault in verify_cache(cache) for name in fault.samples}
    assert named == {key.tobytes()[:8].hex() for key in shards[1].keys}
    check_repaired(cache, original)


@pytest.mark.parametrize(
    ("old", "new"),
    [('{"__', '["__'), ('"keys":{', '"kexs":{'), ('"data_offsets":[', '"data_offsets":{'), ("}}", "} ")],
)
def test_a_corrupt_shard_header_is_detected_and_repaired(old, new, cache, original, truth):
    file = cache / shard_name(2)
    data = file.read_bytes()
    assert old.encode() in data
    file.write_bytes(data.replace(old.encode(), new.encode(), 1))
    check_no_wrong_row(cache, truth)
    assert faulty(cache) == {shard_name(2)}
    check_repaired(cache, original)


def test_a_key_array_that_ends_within_a_key_is_detected_and_repaired(cache, original, truth, shards):
    file, (first, last) = cache / shard_name(2), shards[2].ranges["keys"]
    offsets = f"[{first - shards[2].begin},{last - shards[2].begin}]".encode()
    shorter = f"[{first - shards[2].begin},{last - shards[2].begin - 1}]".encode()
    data = file.read_bytes()
    assert data.count(offsets) == 1
    assert len(offsets) == len(shorter)
    file.write_bytes(data.replace(offsets, shorter))
    assert check_no_wrong_row(cache, truth) == shards[2].rows
    assert faulty(cache) == {shard_name(2)}
    check_repaired(cache, original)


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("damage", ["gone", "empty", "header", "end"])
@pytest.mark.parametrize("name", SINGLE)
def test_a_damaged_file_or_spare_copy_is_restored_from_the_other(name, damage, spare, cache, original, truth):
    file = cache / "spare" / name if spare else cache / name
    if damage == "gone":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        flip_bits(file, 7 if damage == "header" else -20, 0x40)  # byte 7 makes the safetensors header 2^62 bytes long
    rejected = check_no_wrong_row(cache, truth)
    assert rejected == 0 if spare else rejected > 0
    assert faulty(cache) == {f"spare/{name}" if spare else name}
    assert check_repaired(cache, original) == set()


def test_changed_white_space_in_cache_json_is_restored(cache, original, truth):
    text = (cache / "cache.json").read_bytes()
    (cache / "cache.json").write_bytes(text.replace(b"\n", b"\t", 1))
    check_no_wrong_row(cache, truth)
    assert check_repaired(cache, original) == set()


@pytest.mark.parametrize("damage", ["gone", "changed"])
@pytest.mark.parametrize("name", SINGLE)
def test_the_loss_of_both_copies_is_reported_and_changes_no_file(name, damage, cache):
    for file in (cache / name, cache / "spare" / name):
        if damage == "gone":
            file.unlink()
        else:
            flip_bits(file, 9)
    before = files_of(cache)
    with pytest.raises(InputError, match=f"{name} and its spare copy are both missing or damaged"):
        write(cache, ROWS)
    assert files_of(cache) == before


def test_repair_is_rejected_if_samples_of_the_lost_shard_are_not_in_the_data(cache, shards):
    (cache / shard_name(4)).unlink()
    known = {key.tobytes() for key in shards[4].keys[1:]}
    with pytest.raises(
        InputError, match="shard 4 is missing or damaged; expected its .* samples in the data, found 1 missing"
    ):
        write(cache, [row for key, row in ROW_OF.items() if key in known])
