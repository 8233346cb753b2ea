"""Index of the records: 16 bytes per sample on disk, memory-mapped, so that opening it reads no entries."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distill.cache.format.key import KEY_BYTES


@dataclass(frozen=True)
class Index:
    """Places of the samples, sorted by the first 8 bytes of their keys.

    A shard stores the whole keys, so that a reader can distinguish samples whose prefixes are equal.

    Args:
        prefixes: uint64 [samples], the first 8 bytes of the keys as little-endian numbers, ascending.
        places: uint64 [samples], shard · 2^32 + row.
    """

    prefixes: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.prefixes)

    @staticmethod
    def build(keys: np.ndarray, places: np.ndarray) -> "Index":
        """Builds an index from keys uint8 [samples, 16] and their places uint64 [samples]."""
        return _sort_entries(key_prefixes(keys), places)

    def merge(self, other: "Index") -> "Index":
        """Returns an index with the entries of both."""
        prefixes = np.concatenate([self.prefixes, other.prefixes])
        return _sort_entries(prefixes, np.concatenate([self.places, other.places]))

    def find_candidates(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the range of entries (first, last + 1) with the prefix of each key, for keys uint8 [requested, 16].

        First and last + 1 are equal if there are none.
        """
        requested = key_prefixes(keys)
        first = np.searchsorted(self.prefixes, requested)
        last = np.searchsorted(self.prefixes, requested, side="right")
        return first, last

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Returns which of keys uint8 [requested, 16] have an entry, bool [requested], by prefix; no record is read."""
        first, last = self.find_candidates(keys)
        return last > first

    def shard_prefixes(self, shard: int) -> np.ndarray:
        """Returns the prefixes of a shard's rows in row order, uint64."""
        places, prefixes = self._sorted_by_place
        bounds = np.array([shard, shard + 1], np.uint64) << np.uint64(32)
        first, last = np.searchsorted(places, bounds)
        return prefixes[first:last]

    @cached_property
    def _sorted_by_place(self) -> tuple[np.ndarray, np.ndarray]:
        """(places, prefixes) sorted by place: all entries are read once, not once for each shard."""
        order = np.argsort(self.places, kind="stable")
        return np.asarray(self.places)[order], np.asarray(self.prefixes)[order]


def _sort_entries(prefixes: np.ndarray, places: np.ndarray) -> Index:
    order = np.lexsort((places, prefixes))
    return Index(prefixes[order], places[order])


def key_prefixes(keys: np.ndarray) -> np.ndarray:
    """Returns the first 8 bytes of keys uint8 [samples, 16] as little-endian numbers, uint64 [samples]."""
    return np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]


def key_array(keys: Sequence[bytes]) -> np.ndarray:
    """Returns the keys as uint8 [keys, 16]."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def shard_places(shard: int, rows: int) -> np.ndarray:
    """Returns the places of the first `rows` rows of a shard, uint64 [rows]."""
    return (np.uint64(shard) << np.uint64(32)) + np.arange(rows, dtype=np.uint64)
