"""Looks up a teacher's signals by sample content."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from distill.cache.format.identity import Identity
from distill.cache.format.index import key_array
from distill.cache.format.key import sample_keys
from distill.cache.format.shard import DamagedError, Shard, shard_path
from distill.cache.format.store import Store, open_store
from distill.cache.signals import Sampled, SignalMask, TopK
from distill.errors import InputError
from distill.losses.teacher_signals import TeacherSignals

OPEN_SHARDS = 256  # each open shard holds a file descriptor


class CacheReader:
    """A memory-mapped cache that checks each record when it is read; several threads may share one reader.

    Args:
        folder: The cache's folder.
        expected: Identity that the cache must have; None accepts any.

    Raises:
        InputError: The folder holds no cache, a damaged one or one with another identity, or shards are missing (the
            first five are named).
    """

    def __init__(self, folder: Path, expected: Identity | None = None):
        self.folder, self.expected = folder, expected
        self.store: Store = open_store(folder, expected)
        self.shards: OrderedDict[int, Shard] = OrderedDict()
        self.lock = threading.Lock()
        missing = [n for n in range(len(self.store.shard_rows)) if not shard_path(folder, n).is_file()]
        if missing:
            raise self.damage_error([f"{shard_path(folder, n).name}: missing" for n in missing])

    def __reduce__(self) -> tuple[type["CacheReader"], tuple[Path, Identity | None]]:
        """Pickles only the arguments, so that another process maps the files itself."""
        return CacheReader, (self.folder, self.expected)

    def __len__(self) -> int:
        return len(self.store.index)

    def damage_error(self, reasons: Sequence[str]) -> InputError:
        """Returns the error for shards or records that can't be read, which names the first five `reasons`."""
        listed = "; ".join(reasons[:5]) + (f" and {len(reasons) - 5} more" if len(reasons) > 5 else "")
        return InputError(
            f"cache {str(self.folder)!r}: {listed}; `python -m pipelines.cache rebuild --cache {self.folder}` computes "
            "only these again"
        )

    def open_shard(self, number: int) -> Shard:
        """Returns a shard, which stays open until OPEN_SHARDS others were used since.

        Raises:
            DamagedError: The file is missing, truncated, changed or from another cache.
        """
        with self.lock:
            if number in self.shards:
                self.shards.move_to_end(number)
                return self.shards[number]
        shard = Shard(self.folder, number, self.store.shard_rows[number], self.store.identity)
        with self.lock:
            self.shards[number] = shard
            while len(self.shards) > OPEN_SHARDS:
                self.shards.popitem(last=False)
        return shard

    def locate(self, keys: Sequence[bytes]) -> list[tuple[Shard, int]]:
        """Returns the shard and row of each key.

        Raises:
            InputError: A sample isn't in the cache, or a shard can't be read.
        """
        first, last = self.store.index.find_candidates(key_array(keys))
        return [self._locate_key(key, range(a, b)) for key, a, b in zip(keys, first, last, strict=True)]

    def _locate_key(self, key: bytes, entries: range) -> tuple[Shard, int]:
        """Returns the shard and row of a key among the index's `entries` with its prefix; errors as in `locate`."""
        for entry in entries:
            location = int(self.store.index.places[entry])
            number, row = location >> 32, location & 0xFFFFFFFF
            if number >= len(self.store.shard_rows) or row >= self.store.shard_rows[number]:
                raise self.damage_error([f"the index names row {row} of shard {number}, which doesn't exist"])
            try:
                shard = self.open_shard(number)
            except DamagedError as error:
                raise self.damage_error([str(error)]) from error
            if shard.keys[row].tobytes() == key:
                return shard, row
        if len(entries):
            raise self.damage_error([f"sample {key.hex()}: another key is stored in its place"])
        raise InputError(
            f"cache {str(self.folder)!r}: no signal for sample {key.hex()} among {len(self)}: "
            "the data or its preprocessing changed since the cache was written"
        )

    def read_signals(self, keys: Sequence[bytes], mask: SignalMask) -> TeacherSignals:
        """Returns the tensors of a batch by name; see each signal's `decode`.

        For `Sampled` and `TopK` signals, the result also contains their `temperature` and the teacher's number of
        `classes`, since the teacher's vocabulary may be padded to another size than the student's.

        Raises:
            InputError: A sample isn't in the cache, or a record is damaged.
        """
        places = self.locate(keys)
        signals: TeacherSignals = {}
        for signal in self.store.identity.signals:
            try:
                records = [shard.record(row, signal.name) for shard, row in places]
                signals |= signal.decode(records, mask, self.store.codebooks.get(signal.name, {}))
                if isinstance(signal, Sampled | TopK):
                    signals |= {"temperature": signal.temperature, "classes": signal.width}
            except (DamagedError, ValueError) as error:
                raise self.damage_error([str(error)]) from error
        return signals

    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        """Returns the teacher signals of a padded batch, on the CPU."""
        return self.read_signals(sample_keys(batch), SignalMask.from_batch(batch))

    def contains(self, keys: Sequence[bytes]) -> np.ndarray:
        """Returns which keys have an entry in the index, bool [keys], by prefix; no record is read."""
        return self.store.index.contains(key_array(keys))
