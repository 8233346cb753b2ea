"""Writes the signals of a set of samples; goes on where an earlier writer stopped."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from distill.errors import InputError
from distill.teacher.cache.identity import Identity, check_identity
from distill.teacher.cache.key import sample_key
from distill.teacher.cache.shard import DamagedShardError, read_shard, shard_path, write_shard

SHARD_ROWS = 2048
BATCH_ROWS = 32


@dataclass(frozen=True)
class Written:
    """What a call of `write_cache` did: rows in all, shards computed, shards found whole, damaged ones by name."""

    rows: int
    computed: int
    reused: int
    damaged: tuple[str, ...]


def write_cache(
    folder: Path,
    identity: Identity,
    input_ids: Sequence[np.ndarray],
    token_type_ids: Sequence[np.ndarray] | None,
    signals: Callable[[list[int]], np.ndarray],
    on_progress: Callable[[int], None] = lambda rows: None,
) -> Written:
    """Computes and stores the signal of every distinct sample that has none yet.

    Args:
        folder: Where the cache is, or will be.
        identity: What the signals are made from.
        input_ids: Unpadded ids of each sample.
        token_type_ids: Token types of each sample, where the teacher reads them.
        signals: Maps a list of sample numbers to float32 [rows, identity.width].
        on_progress: Told the number of rows done since the last call.

    Raises:
        InputError: The folder holds a cache of something else, or the teacher gives numbers that are not finite.
    """
    keys = [sample_key(ids, token_type_ids[i] if token_type_ids else None) for i, ids in enumerate(input_ids)]
    rows = distinct_by_length(keys, [len(ids) for ids in input_ids])
    plan = [rows[start : start + SHARD_ROWS] for start in range(0, len(rows), SHARD_ROWS)]
    open_folder(folder, identity, [len(part) for part in plan])
    computed, damaged = 0, []
    for index, part in enumerate(plan):
        path, wanted = shard_path(folder, index), key_array([keys[i] for i in part])
        try:
            if np.array_equal(read_shard(path, identity)[0], wanted):
                on_progress(len(part))
                continue
            raise DamagedShardError(f"{path.name}: holds other samples")
        except DamagedShardError as error:
            if path.exists():
                damaged.append(str(error))
        write_shard(path, identity, wanted, compute(part, signals, identity.width, on_progress))
        computed += 1
    return Written(len(rows), computed, len(plan) - computed, tuple(damaged))


def distinct_by_length(keys: Sequence[bytes], lengths: Sequence[int]) -> list[int]:
    """One row a key, ordered by length, then key: a plan that depends on the set of samples and not on their order."""
    first = {key: i for i, key in reversed(list(enumerate(keys)))}
    return sorted(first.values(), key=lambda i: (lengths[i], keys[i]))


def open_folder(folder: Path, identity: Identity, shard_rows: list[int]) -> None:
    index = folder / "cache.json"
    if index.exists():
        check_identity(folder, identity)
    elif folder.exists() and any(file.suffix != ".partial" for file in folder.iterdir()):
        raise InputError(f"cache {str(folder)!r}: the folder holds something else; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    partial = index.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"identity": asdict(identity), "shard_rows": shard_rows}, indent=1))
    partial.replace(index)


def compute(
    part: list[int], signals: Callable[[list[int]], np.ndarray], width: int, on_progress: Callable[[int], None]
) -> np.ndarray:
    out = np.empty((len(part), width), np.float32)
    for start in range(0, len(part), BATCH_ROWS):
        batch = part[start : start + BATCH_ROWS]
        found = signals(batch)
        if found.shape != (len(batch), width):  # numpy would stretch one column over all classes
            raise InputError(f"teacher: expected signals {(len(batch), width)}, found {found.shape}: not one a class")
        out[start : start + len(batch)] = found
        on_progress(len(batch))
    bad = np.flatnonzero(~np.isfinite(out).all(axis=1))
    if len(bad):
        raise InputError(
            f"teacher: logits that are not finite for {len(bad)} samples, the first is sample {part[bad[0]]}: "
            "a student would learn nothing but NaN"
        )
    return out


def key_array(keys: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
