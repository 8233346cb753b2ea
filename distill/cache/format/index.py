"""Index of the records: 16 bytes per sample on disk, memory-mapped, so that opening it reads no entries."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill.cache.format.key import KEY_BYTES

ABSENT = -1


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
    def of(keys: np.ndarray, places: np.ndarray) -> "Index":
        """Builds an index from keys uint8 [samples, 16] and their places uint64 [samples]."""
        prefixes = prefixes_of(keys)
        order = np.lexsort((places, prefixes))
        return Index(prefixes[order], places[order])

    def joined(self, other: "Index") -> "Index":
        prefixes = np.concatenate([self.prefixes, other.prefixes])
        places = np.concatenate([self.places, other.places])
        order = np.lexsort((places, prefixes))
        return Index(prefixes[order], places[order])

    def candidates(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the range of entries (first, last + 1) with the prefix of each key, for keys uint8 [wanted, 16].

        First and last + 1 are equal if there are none.
        """
        wanted = prefixes_of(keys)
        first = np.searchsorted(self.prefixes, wanted)
        last = np.searchsorted(self.prefixes, wanted, side="right")
        return first, last

    def shard_prefixes(self, shard: int) -> np.ndarray:
        """Returns the prefixes of a shard's rows in row order, uint64."""
        mine = np.flatnonzero((self.places >> np.uint64(32)) == shard)
        return self.prefixes[mine][np.argsort(self.places[mine])]


def prefixes_of(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]


def key_array(keys: Sequence[bytes]) -> np.ndarray:
    """Returns the keys as uint8 [keys, 16]."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def place(shard: int, rows: int) -> np.ndarray:
    """Returns the places of the first `rows` rows of a shard."""
    return (np.uint64(shard) << np.uint64(32)) + np.arange(rows, dtype=np.uint64)
