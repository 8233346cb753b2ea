"""A cache's folder: its description, the index of its samples, and the tables that records are coded with."""

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from distill.cache.format.identity import Identity, differences
from distill.cache.format.index import Index
from distill.cache.signals import signal_of
from distill.cache.signals.rans import Table
from distill.cache.signals.signal import Codebook
from distill.errors import InputError

ABOUT = "cache.json"
CODEBOOK = "codebook.safetensors"
REBUILD = "`python -m pipelines.cache rebuild` repairs it"
SPARE = "spare"  # folder with a second copy of every file but the shards


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
        about: The other entries of cache.json: the number of tokens and the origin of the samples.
    """

    folder: Path
    identity: Identity
    shard_rows: tuple[int, ...]
    batch_tokens: int
    index: Index
    codebooks: Mapping[str, Codebook]
    about: Mapping[str, Any]

    def save(self) -> None:
        """Writes all files and their spare copies, cache.json last: until then the existing cache remains valid."""
        tables = {f"{n}.{t}": table.starts for n, book in self.codebooks.items() for t, table in book.items()}
        index = save({"prefixes": np.asarray(self.index.prefixes), "places": np.asarray(self.index.places)})
        files = {
            f"index-{len(self.shard_rows):06d}.safetensors": index,
            CODEBOOK: save(tables or {"none": np.zeros(0, np.uint32)}),
        }
        about = {
            **self.identity.settings(),
            "shard_rows": list(self.shard_rows),
            "batch_tokens": self.batch_tokens,
            "samples": len(self.index),
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
            **self.about,
        }
        files[ABOUT] = format_about(about | {"sha256": about_digest(about)}).encode()
        (self.folder / SPARE).mkdir(exist_ok=True)
        for name, data in files.items():
            write_atomically(self.folder / SPARE / name, data)
            write_atomically(self.folder / name, data)
        remove_old_indexes(self.folder, files)


def remove_old_indexes(folder: Path, files: Collection[str]) -> None:
    """Removes the indexes from before the cache grew, or of an extension that was interrupted."""
    for old in folder.glob("**/index-*.safetensors"):
        if old.name not in files:
            old.unlink(missing_ok=True)


def format_about(about: Mapping[str, Any]) -> str:
    """Returns the text of cache.json."""
    return json.dumps(about, indent=1)


def about_digest(about: Mapping[str, Any]) -> str:
    """Returns the hash of cache.json without its own entry."""
    rest = {name: value for name, value in about.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def repair_files(folder: Path) -> list[str]:
    """Restores cache.json, index and codebook, or their spare copies, from each other if missing or damaged.

    Returns the names of the replaced files.

    Raises:
        InputError: Both copies of a file are missing or damaged.
    """
    repaired = repair_about(folder)
    for name, sha256 in read_about(folder)["files"].items():
        intact = {file: matches_checksum(file, sha256) for file in (folder / name, folder / SPARE / name)}
        good = next((file for file, matches in intact.items() if matches), None)
        if good is None:
            raise lost_file_error(folder, name)
        for file in (file for file, matches in intact.items() if not matches):
            repaired.append(str(file.relative_to(folder)))
            write_atomically(file, good.read_bytes())
    return repaired


def repair_about(folder: Path) -> list[str]:
    """Restores cache.json or its spare copy from the other one; returns the name of the replaced file, if any."""
    own, spare = folder / ABOUT, folder / SPARE / ABOUT
    try:
        read_about(folder)
    except InputError:
        try:
            read_about(folder / SPARE)
        except InputError as error:
            raise lost_file_error(folder, ABOUT) from error
        write_atomically(own, spare.read_bytes())
        return [ABOUT]
    content = own.read_bytes()
    if spare.is_file() and spare.read_bytes() == content:
        return []
    write_atomically(spare, content)
    return [f"{SPARE}/{ABOUT}"]


def lost_file_error(folder: Path, name: str) -> InputError:
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


IDENTITY = ("format", "teacher", "tokenizer", "preprocessing", "compression", "signals")
KNOWN = (*IDENTITY, "shard_rows", "batch_tokens", "samples", "files", "sha256")


def open_store(folder: Path, expected: Identity | None = None) -> Store:
    """Opens a cache; with `expected` None any identity is accepted.

    Raises:
        InputError: The folder holds no cache, a damaged one, or one with another identity (each differing field is
            named).
    """
    about = read_about(folder)
    found = {name: about.get(name) for name in IDENTITY}
    differing = differences(expected.settings(), found) if expected is not None else []
    if differing:
        raise InputError(
            f"cache {str(folder)!r}: made from something else: {'; '.join(differing)}: its signals would be wrong here"
        )
    try:
        signals = tuple(signal_of(settings) for settings in about["signals"].values())
        identity = expected or Identity(
            about["teacher"], about["tokenizer"], signals, about["preprocessing"], about["compression"]
        )
        index_name = next(name for name in about["files"] if name.startswith("index-"))
        return Store(
            folder,
            identity,
            tuple(about["shard_rows"]),
            about["batch_tokens"],
            map_index(folder / index_name, about["samples"]),
            read_codebooks(folder / CODEBOOK, about["files"][CODEBOOK]),
            {name: value for name, value in about.items() if name not in KNOWN},
        )
    except (KeyError, TypeError, StopIteration) as error:
        raise InputError(f"cache {str(folder)!r}: cache.json is damaged ({error!r})") from error
    except InputError:
        if read_about(folder)["files"] == about["files"]:
            raise
        return open_store(folder, expected)  # the cache grew between two reads


def read_about(folder: Path) -> dict[str, Any]:
    try:
        text = (folder / ABOUT).read_bytes().decode()
        about = json.loads(text)
        # Whitespace is compared too: if two copies differ in it, one of them must count as damaged.
        if not isinstance(about, dict) or about.get("sha256") != about_digest(about) or text != format_about(about):
            raise ValueError("it differs from its checksum")
        return about
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


def read_codebooks(file: Path, sha256: str) -> dict[str, dict[str, Table]]:
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError("it differs from its checksum")
        books: dict[str, dict[str, Table]] = {}
        for name, starts in load(data).items():
            signal, _, table = name.partition(".")
            if table:
                books.setdefault(signal, {})[table] = Table(starts)
        return books
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{str(file)!r}: the cache's codebook is missing or damaged ({error}); {REBUILD}") from error


def write_atomically(path: Path, data: bytes) -> None:
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


def remove_leftovers(folder: Path) -> None:
    """Removes the leftovers of a `Store.save` that was killed; the caller must hold the lock."""
    if (folder / ABOUT).exists():
        remove_old_indexes(folder, read_about(folder)["files"])
    for place in (folder, folder / SPARE):
        for name in (ABOUT, CODEBOOK, "index-*.safetensors"):
            for file in place.glob(f"{name}.*.partial"):
                file.unlink()


@contextmanager
def lock_plan(folder: Path) -> Iterator[None]:
    """Waits for the lock on the cache's plan and holds it, so that no other process changes the plan meanwhile."""
    with (folder / "cache.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
