"""Serves a teacher's signals by sample content."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distill.errors import InputError
from distill.teacher.cache.identity import Identity, check_identity
from distill.teacher.cache.key import sample_keys
from distill.teacher.cache.shard import DamagedShardError, read_shard, shard_path


class CacheReader:
    """All rows of a cache, checked when it is opened.

    Raises:
        InputError: Another teacher's cache, or shards that are missing or damaged (each is named).
    """

    def __init__(self, folder: Path, expected: Identity):
        check_identity(folder, expected)
        self.folder = folder
        shards, damaged = [], []
        for index, rows in enumerate(json.loads((folder / "cache.json").read_text())["shard_rows"]):
            try:
                keys, logits = read_shard(shard_path(folder, index), expected)
                if len(keys) != rows or logits.shape != (rows, expected.width):
                    raise DamagedShardError(
                        f"{shard_path(folder, index).name}: expected {rows} rows, found {len(keys)}"
                    )
                shards.append((keys, logits))
            except DamagedShardError as error:
                damaged.append(str(error))
        if damaged:
            raise InputError(f"cache {str(folder)!r}: {'; '.join(damaged)}; write it again to rebuild just these")
        empty = np.empty((0, expected.width), np.float32)
        self.logits = np.concatenate([logits for _, logits in shards]) if shards else empty
        self.row = {bytes(key): i for i, key in enumerate(key for keys, _ in shards for key in keys)}

    def __len__(self) -> int:
        return len(self.row)

    def logits_of(self, keys: Sequence[bytes]) -> Tensor:
        """Logits [len(keys), classes] float32 of the samples with these keys.

        Raises:
            InputError: A sample that the cache doesn't hold.
        """
        try:
            return torch.from_numpy(self.logits[[self.row[key] for key in keys]])
        except KeyError as error:
            raise InputError(
                f"cache {str(self.folder)!r}: no signal for sample {error.args[0].hex()} among {len(self)}: "
                "the data or its preprocessing changed since the cache was written"
            ) from None

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Teacher signals of a padded batch: {"logits": [batch, classes]}."""
        return {"logits": self.logits_of(sample_keys(batch))}
