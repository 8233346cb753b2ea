"""Tests the cache against `docs/reference/cache-format.md`: what the page specifies is computed here by other code."""

import json
import struct
import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b, sha256
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch

from distill.cache import CacheReader, Identity, Sampled, TopK, sample_key, sample_keys
from distill.cache.signals.sampled import draw_offsets
from support.cache_samples import WORDS, Teacher, make_rows, padded, write

# --- keys

IDS, TYPES, POSITIONS, DOCUMENTS = (101, 7, 65_536, 102), (0, 0, 1, 1), (0, 1, 1, 0), (1, 1, 2, 2)


@pytest.mark.parametrize(
    ("fields", "hashed", "digest"),
    [
        ({}, b"", "08a881cb9835675ee78f01b0c2c2d42f"),
        ({"token_type_ids": TYPES}, struct.pack("<4i", *TYPES), "ec9f02605d6c0df7d9b9050ffb59c351"),
        ({"positions": POSITIONS}, b"p\0\1\1\0", "4d75b477b8118c30d796810490ebb3e7"),
        ({"documents": DOCUMENTS}, b"d" + struct.pack("<4i", *DOCUMENTS), "04c9fb081414f158c126fee59f413c09"),
        (
            {"token_type_ids": TYPES, "positions": POSITIONS, "documents": DOCUMENTS},
            struct.pack("<4i", *TYPES) + b"p\0\1\1\0d" + struct.pack("<4i", *DOCUMENTS),
            "076d01158176d8b7adb9192bef74c1c8",
        ),
    ],
    ids=["ids", "token types", "positions", "documents", "all"],
)
def test_a_key_is_the_documented_hash_of_the_unpadded_input(fields, hashed, digest):
    assert blake2b(struct.pack("<4i", *IDS) + hashed, digest_size=16).hexdigest() == digest
    assert sample_key(np.array(IDS), **{name: np.array(value) for name, value in fields.items()}).hex() == digest
    padding = (0, 0)
    batch = {"input_ids": IDS, "attention_mask": (1, 1, 1, 1)} | fields
    (key,) = sample_keys({name: torch.tensor([value + padding]) for name, value in batch.items()})
    assert key.hex() == digest


# --- the draws


def split_mix(key: bytes, seed: int, position: int) -> float:
    """Returns the number in [0, 1) that shifts the draws at a position."""
    mask = 2**64 - 1
    state = int.from_bytes(key[:8], "little") ^ (seed * 0xD1342543DE82EF95 & mask)
    x = (state + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return ((x ^ (x >> 31)) >> 11) / 2**53


@pytest.mark.parametrize(
    ("seed", "offsets"),
    [
        (0, [0.8808644803186358, 0.9542349537095776, 0.04352352792713421]),
        (3, [0.4622911453077274, 0.22433155562313056, 0.09565835759787655]),
    ],
)
def test_the_draws_of_a_position_are_shifted_by_the_documented_number(seed, offsets):
    key = bytes(range(240, 256))
    assert [split_mix(key, seed, position) for position in range(3)] == offsets
    assert draw_offsets(key, 3, seed).tolist() == offsets


# --- a reader

SIZES = {"U8": 1, "U32": 4, "U64": 8}


@cache
def read_file(file: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the metadata and the arrays of a safetensors file: numbers, or bytes for uint8, in rows if there are."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header, arrays = json.loads(data[8:begin]), {}
    metadata = header.pop("__metadata__", {})
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        values, size, width = data[begin + first : begin + last], SIZES[entry["dtype"]], entry["shape"][-1]
        if size > 1:
            values = [int.from_bytes(values[i : i + size], "little") for i in range(0, len(values), size)]
        is_flat = len(entry["shape"]) == 1
        arrays[name] = values if is_flat else [values[i : i + width] for i in range(0, len(values), width)]
    return metadata, arrays


def read_record(folder: Path, key: bytes, name: str) -> bytes:
    """Returns the record of a sample after checking it."""
    description = json.loads((folder / "cache.json").read_text())
    fields = ("format", "teacher", "tokenizer", "preprocessing", "compression", "signals")
    identity = json.dumps({field: description[field] for field in fields}, sort_keys=True)
    digest = sha256(identity.encode()).digest()[:16]
    _, index = read_file(next(folder.glob("index-*.safetensors")))
    entry = bisect_left(index["prefixes"], int.from_bytes(key[:8], "little"))
    number, row = divmod(index["places"][entry], 2**32)
    metadata, shard = read_file(folder / f"shard-{number:06d}.safetensors")
    assert metadata == {"cache": f"{digest.hex()} shard {number}"}
    assert shard["keys"][row] == key
    begin, end = [0, *shard[f"{name}.ends"]][row : row + 2]
    stored: bytes = shard[f"{name}.payload"][begin:end]
    assert zlib.crc32(key + name.encode() + digest + stored) == shard[f"{name}.crc"][row]
    if description["compression"] == "none":
        return stored
    record: bytes = pyarrow.decompress(stored[4:], int.from_bytes(stored[:4], "little"), "zstd", asbytes=True)
    return record


class Coder:
    """The state and the words of a record."""

    def __init__(self, record: bytes):
        self.state, *self.words = struct.unpack(f"<Q{len(record) // 4 - 2}I", record)

    def pop(self, starts: Sequence[int]) -> int:
        bits = starts[-1].bit_length() - 1
        slot = self.state % 2**bits
        symbol = bisect_right(starts, slot) - 1
        self.state = (starts[symbol + 1] - starts[symbol]) * (self.state >> bits) + slot - starts[symbol]
        if self.state < 2**31:
            self.state = self.state * 2**32 + self.words.pop()
        return symbol

    def push(self, symbol: int, starts: Sequence[int]) -> None:
        bits, frequency = starts[-1].bit_length() - 1, starts[symbol + 1] - starts[symbol]
        if self.state >= frequency << (63 - bits):
            self.words.append(self.state % 2**32)
            self.state >>= 32
        self.state = (self.state // frequency << bits) + self.state % frequency + starts[symbol]

    def pop_set(self, size: int, starts: Sequence[int]) -> list[int]:
        ids: list[int] = []
        for count in range(1, size + 1):
            symbol = self.pop(starts)
            insort(ids, symbol)
            self.push(ids.index(symbol), [rank * 2**16 // count for rank in range(count + 1)])
        return ids


def decode_sampled(coder: Coder, tables: Mapping[str, Any], draws: int) -> dict[int, float]:
    """Returns the weight of each id at the next position."""
    size = coder.pop(tables["sampled.sizes"])
    counts, left = [], draws - size
    for remaining in range(size, 0, -1):
        more = left
        if left > 0 and remaining > 1:
            context = min(7, (4 * left // remaining).bit_length())
            more = coder.pop(tables["sampled.extras"][context])
        counts.append(1 + more)
        left -= more
    ids = coder.pop_set(size, tables["sampled.ids"])
    return {i: count / draws for i, count in zip(ids, counts, strict=True)}


def decode_topk(coder: Coder, tables: Mapping[str, Any], k: int, step: float) -> tuple[dict[int, float], float]:
    """Returns the log-probability of each id at the next position, and the probability of the tail."""
    starts = tables["topk.ids"]
    floor, tail = coder.pop(tables["topk.floors"]), coder.pop(tables["topk.tails"])
    levels = {}
    for i in coder.pop_set(k, starts):
        magnitude = (starts[i + 1] - starts[i]).bit_length() - 1
        levels[i] = floor - coder.pop(tables["topk.above"][min(15, magnitude)])
    others = 0.0 if tail == 1023 else exp(-step * tail)
    total = sum(exp(-step * level) for level in levels.values()) + others
    return {i: -step * level - log(total) for i, level in levels.items()}, others / total


def confident_teacher(width: int = WORDS) -> Teacher:
    """Returns a teacher whose distribution is one or two ids at some positions; id 0 is likely everywhere."""
    teacher = Teacher()
    teacher.logits[:, 0] = teacher.logits.amax(-1) - 0.5
    teacher.logits[::7] *= 100
    teacher.logits[3::7] *= 8
    teacher.logits = torch.nn.functional.pad(teacher.logits, (0, width - WORDS), value=-100)
    return teacher


@pytest.mark.parametrize(("compression", "draws"), [("none", 24), ("zstd", 100)])
def test_every_sampled_record_is_decoded_by_the_documented_steps(compression, draws, tmp_path):
    identity = Identity("t", "k", (Sampled(WORDS, draws=draws),), "max_length=16, über", compression)
    rows, sizes = make_rows(), set()
    write(tmp_path, rows, confident_teacher(), identity)
    reader, (_, tables) = CacheReader(tmp_path, identity), read_file(tmp_path / "codebook.safetensors")
    for row in rows:
        coder, signals = Coder(read_record(tmp_path, sample_key(row), "sampled")), reader(padded([row]))
        for ids, weights in zip(signals["ids"].tolist(), signals["weights"].tolist(), strict=True):
            expected = {i: weight for i, weight in zip(ids, weights, strict=True) if weight}
            assert decode_sampled(coder, tables, draws) == pytest.approx(expected)
            sizes.add(len(expected))
        assert (coder.state, coder.words) == (2**62, [])
    assert {1, 2, 12} < sizes


@pytest.mark.parametrize(("width", "k", "step"), [(WORDS, 12, 0.125), (5000, 2, 0.01)])
def test_every_topk_record_is_decoded_by_the_documented_steps(width, k, step, tmp_path):
    identity = Identity("t", "k", (TopK(width, k=k, step=step),))
    rows, tails = make_rows(), set()
    write(tmp_path, rows, confident_teacher(width), identity)
    reader, (_, tables) = CacheReader(tmp_path, identity), read_file(tmp_path / "codebook.safetensors")
    for row in rows:
        coder, signals = Coder(read_record(tmp_path, sample_key(row), "topk")), reader(padded([row]))
        positions = zip(*(signals[name].tolist() for name in ("ids", "log_probs", "tail")), strict=True)
        for ids, log_probs, tail in positions:
            found, others = decode_topk(coder, tables, k, step)
            assert found == pytest.approx(dict(zip(ids, log_probs, strict=True)), rel=1e-5, abs=1e-5)
            assert others == pytest.approx(tail, abs=1e-6)
            tails.add(others)
        assert (coder.state, coder.words) == (2**62, [])
    assert 0.0 in tails
    assert max(tails) > 0.1


def test_cache_json_has_the_documented_hashes(tmp_path):
    write(tmp_path, make_rows(5), identity=Identity("t", "k", (TopK(WORDS, k=12),), "über"))
    content = json.loads((tmp_path / "cache.json").read_text())
    for name, digest in content["files"].items():
        assert sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    found = content.pop("sha256")
    assert sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() == found
