"""A cache's folder: its description, the index of its samples, and the tables that records are coded with."""

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from distill.cache.format.identity import Identity, list_differences
from distill.cache.format.index import Index
from distill.cache.signals import build_signal
from distill.cache.signals.rans import FrequencyTable
from distill.cache.signals.signal import Codebook
from distill.errors import InputError

CACHE_JSON = "cache.json"
CODEBOOK = "codebook.safetensors"
REBUILD = "`python -m pipelines.cache rebuild` repairs it"
SPARE = "spare"  # folder with a second copy of every file but the shards

_IDENTITY_FIELDS = ("format", "teacher", "tokenizer", "preprocessing", "compression", "signals")
_OWN_FIELDS = (*_IDENTITY_FIELDS, "shard_rows", "batch_tokens", "samples", "files", "sha256")


class CacheMetadata(TypedDict):
    """Entries of cache.json that don't affect reading: the number of tokens, and what the samples were made from."""

    tokens: int
    made_from: dict[str, object]


@dataclass(frozen=True)
class Store:
    """An opened cache.

    Args:
        folder: The cache's folder.
        identity: What the cache was made from.
        shard_rows: Number of rows of each shard, written or not.
        batch_tokens: Tokens per batch of the teacher; a rebuilt row has to be computed in the same batch.
        index: Place of every sample.
        codebooks: Frequency tables by signal name.
        metadata: The other entries of cache.json.
    """

    folder: Path
    identity: Identity
    shard_rows: tuple[int, ...]
    batch_tokens: int
    index: Index
    codebooks: Mapping[str, Codebook]
    metadata: CacheMetadata

    def save(self) -> None:
        """Writes all files and their spare copies, cache.json last: until then the existing cache remains valid."""
        tables = {f"{n}.{t}": table.starts for n, codebook in self.codebooks.items() for t, table in codebook.items()}
        index = save({"prefixes": np.asarray(self.index.prefixes), "places": np.asarray(self.index.places)})
        files = {
            f"index-{len(self.shard_rows):06d}.safetensors": index,
            CODEBOOK: save(tables or {"none": np.zeros(0, np.uint32)}),
        }
        content: dict[str, object] = {
            **self.identity.settings(),
            "shard_rows": list(self.shard_rows),
            "batch_tokens": self.batch_tokens,
            "samples": len(self.index),
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
            **self.metadata,
        }
        files[CACHE_JSON] = _format_cache_json(content | {"sha256": _hash_cache_json(content)}).encode()
        (self.folder / SPARE).mkdir(exist_ok=True)
        for name, data in files.items():
            _write_atomically(self.folder / SPARE / name, data)
            _write_atomically(self.folder / name, data)
        _remove_old_indexes(self.folder, files)


def _remove_old_indexes(folder: Path, files: Collection[str]) -> None:
    """Removes the indexes from before the cache grew, or of an extension that was interrupted."""
    for old in folder.glob("**/index-*.safetensors"):
        if old.name not in files:
            old.unlink(missing_ok=True)


def _format_cache_json(content: Mapping[str, object]) -> str:
    """Returns the text of cache.json."""
    return json.dumps(content, indent=1)


def _hash_cache_json(content: Mapping[str, object]) -> str:
    """Returns the hash of cache.json without its own entry."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def repair_files(folder: Path) -> list[str]:
    """Restores cache.json, index and codebook, or their spare copies, from each other if missing or damaged.

    Returns the names of the replaced files.

    Raises:
        InputError: Both copies of a file are missing or damaged.
    """
    repaired = _repair_cache_json(folder)
    for name, sha256 in read_cache_json(folder)["files"].items():
        intact = {file: matches_checksum(file, sha256) for file in (folder / name, folder / SPARE / name)}
        source = next((file for file, matches in intact.items() if matches), None)
        if source is None:
            raise lost_file_error(folder, name)
        for file in (file for file, matches in intact.items() if not matches):
            repaired.append(str(file.relative_to(folder)))
            _write_atomically(file, source.read_bytes())
    return repaired


def _repair_cache_json(folder: Path) -> list[str]:
    """Restores cache.json or its spare copy from the other one; returns the name of the replaced file, if any."""
    original, spare = folder / CACHE_JSON, folder / SPARE / CACHE_JSON
    try:
        read_cache_json(folder)
    except InputError:
        try:
            read_cache_json(folder / SPARE)
        except InputError as error:
            raise lost_file_error(folder, CACHE_JSON) from error
        _write_atomically(original, spare.read_bytes())
        return [CACHE_JSON]
    content = original.read_bytes()
    if spare.is_file() and spare.read_bytes() == content:
        return []
    _write_atomically(spare, content)
    return [f"{SPARE}/{CACHE_JSON}"]


def lost_file_error(folder: Path, name: str) -> InputError:
    """Returns the error for a file of which both copies are missing or damaged."""
    return InputError(
        f"cache {str(folder)!r}: {name} and its spare copy are both missing or damaged: nothing can be read without "
        "it; write the cache again in a new folder"
    )


def matches_checksum(file: Path, sha256: str) -> bool:
    """Returns whether a file exists and has this checksum; it isn't read into memory as a whole."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == sha256


def open_store(folder: Path, expected: Identity | None = None) -> Store:
    """Opens a cache; with `expected` None any identity is accepted.

    Raises:
        InputError: The folder holds no cache, a damaged one, or one with another identity (each differing field is
            named).
    """
    require_folder(folder)
    content = read_cache_json(folder)
    found = {name: content.get(name) for name in _IDENTITY_FIELDS}
    differing = list_differences(expected.settings(), found) if expected is not None else []
    if differing:
        raise InputError(
            f"cache {str(folder)!r}: made from other inputs: {'; '.join(differing)}: its signals would not be those of "
            "this teacher and data"
        )
    try:
        signals = tuple(build_signal(settings) for settings in content["signals"].values())
        identity = expected or Identity(
            content["teacher"], content["tokenizer"], signals, content["preprocessing"], content["compression"]
        )
        index_name = next(name for name in content["files"] if name.startswith("index-"))
        return Store(
            folder,
            identity,
            tuple(content["shard_rows"]),
            content["batch_tokens"],
            map_index(folder / index_name, content["samples"]),
            _read_codebooks(folder / CODEBOOK, content["files"][CODEBOOK]),
            cast(CacheMetadata, {name: value for name, value in content.items() if name not in _OWN_FIELDS}),
        )
    except (KeyError, TypeError, StopIteration) as error:
        raise InputError(f"cache {str(folder)!r}: cache.json is damaged ({error!r})") from error
    except InputError:
        if read_cache_json(folder)["files"] == content["files"]:
            raise
        return open_store(folder, expected)  # the cache grew between two reads


def require_folder(folder: Path) -> None:
    """Raises InputError unless the folder exists."""
    if not folder.is_dir():
        raise InputError(f"cache {str(folder)!r}: expected the folder of a cache, found none there")


def read_cache_json(folder: Path) -> dict[str, Any]:
    """Returns the parsed cache.json.

    Raises:
        InputError: It is missing, or differs from its checksum.
    """
    try:
        text = (folder / CACHE_JSON).read_bytes().decode()
        content = json.loads(text)
        # Whitespace is compared too: if two copies differ in it, one of them must count as damaged.
        is_intact = isinstance(content, dict) and content.get("sha256") == _hash_cache_json(content)
        if not is_intact or text != _format_cache_json(content):
            raise ValueError("it differs from its checksum")
        return cast(dict[str, Any], content)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cache {str(folder)!r}: cache.json is missing or damaged ({error}): not a cache, or {REBUILD}"
        ) from error


def map_index(file: Path, samples: int) -> Index:
    """Memory-maps the index, opening the file once.

    A damaged entry leads to a row with a different key, for which the reader raises.
    """
    try:
        # Mapped: with a corrupt length a slice is merely short, whereas reading could exhaust memory.
        data = np.memmap(file, np.uint8, "r")
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:begin].tobytes())
        arrays = []
        for name in ("prefixes", "places"):
            first, last = header[name]["data_offsets"]
            if first < 0 or last - first != 8 * samples or len(data) < begin + last:
                raise ValueError(f"expected {samples} entries")
            arrays.append(data[begin + first : begin + last].view(np.uint64))
        return Index(*arrays)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(file)!r}: the cache's index is missing or damaged ({error}); rebuild the cache"
        ) from error


def _read_codebooks(file: Path, sha256: str) -> dict[str, dict[str, FrequencyTable]]:
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError("it differs from its checksum")
        codebooks: dict[str, dict[str, FrequencyTable]] = {}
        for name, starts in load(data).items():
            signal, _, table = name.partition(".")
            if table:
                codebooks.setdefault(signal, {})[table] = FrequencyTable(starts)
        return codebooks
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{str(file)!r}: the cache's codebook is missing or damaged ({error}); {REBUILD}") from error


def _write_atomically(path: Path, data: bytes) -> None:
    """Writes a temporary file beside `path` and renames it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Removes the partial files of a `Store.save` that was killed; the caller must hold the lock."""
    if (folder / CACHE_JSON).exists():
        _remove_old_indexes(folder, read_cache_json(folder)["files"])
    for parent in (folder, folder / SPARE):
        for name in (CACHE_JSON, CODEBOOK, "index-*.safetensors"):
            for file in parent.glob(f"{name}.*.partial"):
                file.unlink()


@contextmanager
def lock_plan(folder: Path) -> Iterator[None]:
    """Waits for the lock on the cache's plan and holds it, so that no other process changes the plan meanwhile."""
    with (folder / "cache.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
