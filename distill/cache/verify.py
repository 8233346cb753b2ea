"""Reads every byte of a cache and reports each damaged byte range with the samples it affects."""

from dataclasses import dataclass, replace
from pathlib import Path

from distill.cache.format.index import key_prefixes
from distill.cache.format.shard import DamagedError, Shard, shard_path
from distill.cache.format.store import (
    CACHE_JSON,
    SPARE,
    Store,
    map_index,
    matches_checksum,
    open_store,
    read_cache_json,
)


@dataclass(frozen=True)
class DamagedRange:
    """A damaged byte range of a cache file.

    Args:
        file: Path of the file relative to the cache's folder.
        start, end: The byte range; 0 and 0 for a missing file.
        samples: Affected keys in hexadecimal: 32 digits, or only the first 16 if the shard's copy of the key is
            damaged. Empty for files other than shards.
        reason: What is wrong.
    """

    file: str
    start: int
    end: int
    samples: tuple[str, ...]
    reason: str


def verify_cache(folder: Path) -> list[DamagedRange]:
    """Returns every fault of a cache; an empty list means that all records, keys and tables are intact.

    Raises:
        InputError: cache.json, the index or the codebook can't be read, so nothing else can be either (`rebuild`
            repairs them).
    """
    store, faults = open_store(folder), []
    files = read_cache_json(folder)["files"]
    for name, sha256 in files.items():
        for file in (folder / name, folder / SPARE / name):
            if not matches_checksum(file, sha256):
                faults.append(_describe_file(file, folder, (), "differs from its checksum"))
    spare = folder / SPARE / CACHE_JSON
    if not spare.is_file() or spare.read_bytes() != (folder / CACHE_JSON).read_bytes():
        faults.append(_describe_file(spare, folder, (), "differs from cache.json"))
    name = next(name for name in files if name.startswith("index-"))
    copy = next((file for file in (folder / name, folder / SPARE / name) if matches_checksum(file, files[name])), None)
    if copy is not None:  # only an intact index determines what the shards must contain
        store = replace(store, index=map_index(copy, len(store.index)))
        for number in range(len(store.shard_rows)):
            faults += _find_shard_faults(store, number)
    return faults


def _find_shard_faults(store: Store, number: int) -> list[DamagedRange]:
    """Returns the faults of a shard, after reading all of it."""
    path, prefixes = shard_path(store.folder, number), store.index.shard_prefixes(number)
    try:
        shard = Shard(store.folder, number, store.shard_rows[number], store.identity)
    except DamagedError as error:
        return [_describe_file(path, store.folder, tuple(p.tobytes().hex() for p in prefixes), str(error))]
    intact = key_prefixes(shard.keys) == prefixes
    names = [(shard.keys if intact[row] else prefixes)[row].tobytes().hex() for row in range(shard.rows)]
    damage = shard.find_damage(prefixes)
    return [DamagedRange(path.name, d.start, d.end, tuple(names[row] for row in d.rows), d.reason) for d in damage]


def _describe_file(path: Path, folder: Path, samples: tuple[str, ...], reason: str) -> DamagedRange:
    """Returns the fault of a whole file."""
    size = path.stat().st_size if path.is_file() else 0
    return DamagedRange(str(path.relative_to(folder)), 0, size, samples, reason if size else "missing or empty")
