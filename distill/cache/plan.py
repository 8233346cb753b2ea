"""Assigns samples to shards and groups them into batches for the teacher."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from distill.cache.format.index import Index, key_array, shard_places
from distill.cache.signals import Signal

SHARD_BYTES = 32 << 20
SHARD_TOKENS = 1 << 18
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Samples:
    """Samples whose teacher signals are requested.

    Args:
        keys: Key of each sample, from `sample_key`; equal samples have equal keys and are computed once.
        lengths: Number of tokens in each sample.
        batch: Maps sample numbers to a padded batch: input_ids, attention_mask and the teacher's other inputs.
    """

    keys: Sequence[bytes]
    lengths: np.ndarray
    batch: Callable[[Sequence[int]], Mapping[str, Tensor]]

    def __len__(self) -> int:
        return len(self.keys)


def select_new_rows(samples: Samples, contains: Callable[[np.ndarray], np.ndarray] | None) -> list[int]:
    """Returns one sample per key, sorted by length, then key, without the keys that the cache `contains`."""
    first = {key: i for i, key in reversed(list(enumerate(samples.keys)))}
    rows = sorted(first.values(), key=lambda i: (samples.lengths[i], samples.keys[i]))
    if contains is None or not rows:
        return rows
    known = contains(key_array([samples.keys[i] for i in rows]))
    return [row for row, is_known in zip(rows, known, strict=True) if not is_known]


def assign_shards(lengths: np.ndarray, signals: Sequence[Signal]) -> list[int]:
    """Returns the number of rows in each shard: as many as fit within SHARD_TOKENS tokens and about SHARD_BYTES."""
    token_bytes = sum(signal.nominal_bytes() for signal in signals)
    limit = max(1, min(SHARD_TOKENS, int(SHARD_BYTES / token_bytes)))
    shards, rows, tokens = [], 0, 0
    for length in lengths:
        if rows and tokens + length > limit:
            shards.append(rows)
            rows = tokens = 0
        rows, tokens = rows + 1, tokens + int(length)
    return [*shards, rows] if rows else shards


def group_batches(lengths: Sequence[int] | np.ndarray, batch_tokens: int) -> list[range]:
    """Returns ranges of consecutive rows, each with at most `batch_tokens` tokens after padding or a single row."""
    batches, start, longest = [], 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, int(length))
        if row > start and longest * (row + 1 - start) > batch_tokens:
            batches.append(range(start, row))
            start, longest = row, int(length)
    return [*batches, range(start, len(lengths))] if len(lengths) else batches


def build_index(samples: Samples, rows: Sequence[int], shard_rows: Sequence[int], first_shard: int) -> Index:
    """Returns the index of new samples, whose shards follow the existing ones."""
    places = [shard_places(first_shard + i, count) for i, count in enumerate(shard_rows)]
    keys = key_array([samples.keys[i] for i in rows])
    return Index.build(keys, np.concatenate(places) if places else np.zeros(0, np.uint64))
