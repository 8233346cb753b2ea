"""Where each sample's record is: 16 bytes a sample on disk, mapped into memory, nothing read when it is opened."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill.cache.format.key import KEY_BYTES

ABSENT = -1


@dataclass(frozen=True)
class Index:
    """Sorted by the first 8 bytes of the key; the shard holds the whole key, so a reader knows its row from a twin's.

    Args:
        prefixes: uint64 [samples], the keys' first 8 bytes as little-endian numbers, ascending.
        places: uint64 [samples], shard · 2^32 + row.
    """

    prefixes: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.prefixes)

    @staticmethod
    def of(keys: np.ndarray, places: np.ndarray) -> "Index":
        """From keys uint8 [samples, 16] and their places uint64 [samples]."""
        prefixes = prefixes_of(keys)
        order = np.lexsort((places, prefixes))
        return Index(prefixes[order], places[order])

    def joined(self, other: "Index") -> "Index":
        prefixes = np.concatenate([self.prefixes, other.prefixes])
        places = np.concatenate([self.places, other.places])
        order = np.lexsort((places, prefixes))
        return Index(prefixes[order], places[order])

    def candidates(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last + 1 entry with each key's prefix; keys uint8 [wanted, 16]. Equal where there is none."""
        wanted = prefixes_of(keys)
        first = np.searchsorted(self.prefixes, wanted)
        last = np.searchsorted(self.prefixes, wanted, side="right")
        return first, last

    def shard_prefixes(self, shard: int) -> np.ndarray:
        """Prefixes of a shard's rows in their order, uint64."""
        mine = np.flatnonzero((self.places >> np.uint64(32)) == shard)
        return self.prefixes[mine][np.argsort(self.places[mine])]


def prefixes_of(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]


def key_array(keys: Sequence[bytes]) -> np.ndarray:
    """uint8 [keys, 16]."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def place(shard: int, rows: int) -> np.ndarray:
    """Places of the first `rows` rows of a shard."""
    return (np.uint64(shard) << np.uint64(32)) + np.arange(rows, dtype=np.uint64)
