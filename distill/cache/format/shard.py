"""Shard files of records: written atomically, memory-mapped, every record checked when it is read."""

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import pyarrow as pa
from safetensors.numpy import save

from distill.cache.format.identity import Identity
from distill.cache.format.index import key_prefixes
from distill.cache.format.key import KEY_BYTES

ShardHeader: TypeAlias = dict[str, Any]  # a file's JSON header, whose structure isn't checked yet


class DamagedError(Exception):
    """Error for a shard or record that is missing, truncated, changed or from another cache."""


def shard_path(folder: Path, number: int) -> Path:
    """Returns the path of a shard's file."""
    return folder / f"shard-{number:06d}.safetensors"


@contextmanager
def claim_file(path: Path) -> Iterator[IO[bytes] | None]:
    """Yields the empty file that will become `path`, or None while another process works on it.

    The lock is released when the process that holds it ends, for whatever reason; the partial file of a killed process
    is overwritten.
    """
    partial = path.with_suffix(".partial")
    with partial.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        # Between opening and locking, the previous process may have finished and renamed this very file.
        if not _is_linked(file, partial):
            yield None
            return
        try:
            file.truncate(0)
            yield file
        finally:
            if _is_linked(file, partial):
                partial.unlink()


def _is_linked(file: IO[bytes], path: Path) -> bool:
    """Returns whether `path` still names the opened file."""
    try:
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def publish_shard(file: IO[bytes], path: Path, data: bytes) -> None:
    """Writes `data` into a claimed file and renames it to `path`."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    path.with_suffix(".partial").replace(path)


def shard_bytes(identity: Identity, number: int, keys: np.ndarray, records: Mapping[str, Sequence[bytes]]) -> bytes:
    """Returns the file: keys uint8 [rows, 16] and, per signal, `payload`, `ends` uint64 and `crc` uint32 [rows]."""
    tensors = {"keys": np.ascontiguousarray(keys)}
    for name, parts in records.items():
        stored = [compress_record(part, identity) for part in parts]
        tensors[f"{name}.payload"] = np.frombuffer(b"".join(stored), np.uint8)
        tensors[f"{name}.ends"] = np.cumsum([len(part) for part in stored], dtype=np.uint64)
        sums = (_checksum(part, key.tobytes(), name, identity) for part, key in zip(stored, keys, strict=True))
        tensors[f"{name}.crc"] = np.fromiter(sums, np.uint32, len(stored))
    return save(tensors, metadata=_shard_metadata(identity, number))


def _shard_metadata(identity: Identity, number: int) -> dict[str, str]:
    # A single entry: safetensors writes several in no fixed order, and files have to be bit-identical.
    return {"cache": f"{identity.digest.hex()} shard {number}"}


def _checksum(stored: bytes | memoryview, key: bytes, name: str, identity: Identity) -> int:
    # Includes the key and the cache: otherwise an intact record from elsewhere would be accepted.
    return zlib.crc32(stored, zlib.crc32(key + name.encode() + identity.digest))


def compress_record(record: bytes, identity: Identity) -> bytes:
    """Returns the record as it is stored: with the cache's compression, after its length as uint32."""
    if identity.compression == "none":
        return record
    compressed: bytes = pa.compress(record, "zstd", asbytes=True)
    return len(record).to_bytes(4, "little") + compressed


def _decompress_record(stored: memoryview, identity: Identity) -> memoryview:
    if identity.compression == "none":
        return stored
    size = int.from_bytes(stored[:4], "little")
    return memoryview(pa.decompress(stored[4:], size, "zstd"))


@dataclass(frozen=True)
class Damage:
    """A damaged byte range of a shard's file and the rows it affects."""

    start: int
    end: int
    rows: tuple[int, ...]
    reason: str


class Shard:
    """A memory-mapped shard file.

    Raises:
        DamagedError: The file is missing, too short, not a shard, or belongs to another number or cache.
    """

    def __init__(self, folder: Path, number: int, rows: int, identity: Identity):
        self.path, self.identity, self.rows = shard_path(folder, number), identity, rows
        try:
            self.data = np.memmap(self.path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise DamagedError(f"{self.path.name}: missing or unreadable ({error})") from error
        header = self._read_header()
        self.ranges: dict[str, tuple[int, int]] = {}
        self.metadata = _shard_metadata(identity, number)
        if header.pop("__metadata__", None) != self.metadata:
            raise DamagedError(f"{self.path.name}: expected the header of this shard of this cache, found another")
        keys = self._map_tensor(header, "keys", np.uint8)
        if len(keys) != rows * KEY_BYTES:
            raise DamagedError(f"{self.path.name}: expected {rows} rows, found {len(keys) / KEY_BYTES:g}")
        self.keys = keys.reshape(rows, KEY_BYTES)
        self.signals = {}
        for signal in identity.signals:
            ends = self._map_tensor(header, f"{signal.name}.ends", np.uint64)
            crc = self._map_tensor(header, f"{signal.name}.crc", np.uint32)
            self.signals[signal.name] = (self._map_tensor(header, f"{signal.name}.payload", np.uint8), ends, crc)
            if not len(ends) == len(crc) == rows:
                raise DamagedError(
                    f"{self.path.name}: expected {rows} rows, found {len(ends)} ends, {len(crc)} checksums"
                )

    def _read_header(self) -> ShardHeader:
        """Returns the parsed header and sets where the tensors begin."""
        try:
            (size,) = struct.unpack("<Q", self.data[:8].tobytes())
            self.begin = 8 + size
            header = json.loads(self.data[8 : self.begin].tobytes())
            if not isinstance(header, dict):
                raise ValueError("it is not a JSON object")
            return header
        except (struct.error, ValueError) as error:
            raise DamagedError(f"{self.path.name}: its header can't be read ({error})") from error

    def _map_tensor(self, header: ShardHeader, name: str, dtype: type) -> np.ndarray:
        """Returns a tensor of the file, memory-mapped and flat, and stores its byte range."""
        try:
            first, last = header[name]["data_offsets"]
            if not 0 <= first <= last <= len(self.data) - self.begin:
                raise DamagedError(f"{self.path.name}: truncated, or its header changed")
            self.ranges[name] = (self.begin + first, self.begin + last)
            return self.data[self.begin + first : self.begin + last].view(dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{self.path.name}: its header changed ({name}: {error})") from error

    def record_range(self, row: int, name: str) -> tuple[int, int]:
        """Returns the start and end of a record in its payload."""
        ends = self.signals[name][1]
        return int(ends[row - 1]) if row else 0, int(ends[row])

    def record(self, row: int, name: str) -> memoryview:
        """Returns a record after checking it.

        Raises:
            DamagedError: The record differs from its checksum.
        """
        payload, _, crc = self.signals[name]
        first, last = self.record_range(row, name)
        stored = payload[first:last].data if first <= last <= len(payload) else None
        if stored is None or _checksum(stored, self.keys[row].tobytes(), name, self.identity) != crc[row]:
            raise DamagedError(f"{self.path.name}: row {row} differs from its checksum")
        return _decompress_record(stored, self.identity)

    def find_damage(self, prefixes: np.ndarray) -> list[Damage]:
        """Returns the byte range of each damaged key and record, or the whole file if only other bytes changed.

        Args:
            prefixes: uint64 [rows], the prefixes of the keys according to the index: an intact shard of a cache with
                the same identity, but other samples, differs in nothing else.
        """
        begin = self.ranges["keys"][0]
        other_keys = np.flatnonzero(key_prefixes(self.keys) != prefixes).tolist()
        damages = [
            Damage(begin + KEY_BYTES * row, begin + KEY_BYTES * (row + 1), (row,), "not the index's key")
            for row in other_keys
        ]
        for name in self.signals:
            begin = self.ranges[f"{name}.payload"][0]
            for row in range(self.rows):
                try:
                    self.record(row, name)
                except DamagedError:
                    first, last = self.record_range(row, name)
                    last = min(max(first, last), len(self.signals[name][0]))
                    damages.append(Damage(begin + min(first, last), begin + last, (row,), "differs from its checksum"))
        if not damages and self._serialize() != self.data.tobytes():
            damages.append(Damage(0, len(self.data), tuple(range(self.rows)), "its header or padding changed"))
        return damages

    def _serialize(self) -> bytes:
        """Returns the file as `shard_bytes` would write it from the parsed contents."""
        arrays = {"keys": np.array(self.keys)}
        for name, parts in self.signals.items():
            arrays |= {f"{name}.{part}": np.array(a) for part, a in zip(("payload", "ends", "crc"), parts, strict=True)}
        return save(arrays, metadata=self.metadata)
