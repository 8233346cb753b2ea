"""A tiny teacher, its samples and its caches, shared by the cache tests and their worker processes."""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.cache import CacheReader, Dense, Identity, Sampled, Samples, TopK, plan, sample_key, write_cache
from distill.cache.writer import WriteResult
from support.processes.forking import fork_server

WORDS = 96
BATCH_TOKENS = 48
SHARD_TOKENS = 120
IDENTITY = Identity(
    "teacher-a",
    "tokenizer-a",
    (
        Sampled(width=WORDS, draws=6),
        TopK(width=WORDS, k=4),
        Dense(width=WORDS, each="position", dtype="float16"),
        Dense(width=3, of="embedding"),
    ),
    "max_length=16",
)


def make_rows(count: int = 60, seed: int = 0, shortest: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, WORDS, rng.integers(shortest, 16)) for _ in range(count)]


def padded(rows: Sequence[np.ndarray], width: int = 0, pad: int = 0) -> dict[str, torch.Tensor]:
    """Returns a padded batch of rows, at least `width` wide."""
    width = max(width, *(len(row) for row in rows))
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def build_samples(rows: Sequence[np.ndarray]) -> Samples:
    lengths = np.array([len(row) for row in rows], np.int64)
    return Samples(keys_of(rows), lengths, lambda chosen: padded([rows[i] for i in chosen]))


def keys_of(rows: Sequence[np.ndarray]) -> list[bytes]:
    return [sample_key(row) for row in rows]


def look_up(width: int, seed: int) -> torch.Tensor:
    return torch.randn(WORDS, width, generator=torch.Generator().manual_seed(seed)) * 2


class Teacher:
    """A teacher that looks up its outputs: logits of each id, and an embedding that is distinct for each sample.

    Args:
        whole_batch: Outputs depend slightly on the whole batch, like those of real models through rounding.
        pause: Seconds that each call takes.
    """

    def __init__(self, whole_batch: bool = False, pause: float = 0.0):
        self.logits, self.embedding = look_up(WORDS, 0), look_up(3, 1)
        self.whole_batch, self.pause = whole_batch, pause
        self.queried_keys: list[bytes] = []

    def __call__(self, batch: Any) -> dict[str, torch.Tensor]:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        self.queried_keys += [sample_key(row[m].numpy()) for row, m in zip(ids, mask.bool(), strict=True)]
        time.sleep(self.pause)
        mixed = (ids * mask * torch.arange(1, ids.shape[1] + 1)).sum(1)
        extra = int((ids * mask).sum()) / 2**20 if self.whole_batch else 0.0
        return {"logits": self.logits[ids] + extra, "embedding": self.embedding[mixed % WORDS] + mixed[:, None] + extra}


def write(
    folder: Path, rows: Sequence[np.ndarray], teacher: Any = None, identity: Identity = IDENTITY, **more: Any
) -> WriteResult:
    """Writes a cache of several small shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SHARD_TOKENS", SHARD_TOKENS)
        more = {"batch_tokens": BATCH_TOKENS} | more
        return write_cache(folder, identity, build_samples(rows), teacher or Teacher(), **more)


def start_writer(
    folder: Path, rows: Sequence[np.ndarray], pause: float, rank: int = 0, ranks: int = 1
) -> tuple[ForkServerProcess, Connection]:
    """Starts a writer process; the pipe delivers `ready` before writing and the result of `write` after it."""
    receive, send = fork_server().Pipe(duplex=False)
    process = fork_server().Process(target=write_in_process, args=(send, folder, rows, pause, rank, ranks))
    process.start()
    send.close()
    return process, receive


def write_in_process(
    send: Connection, folder: Path, rows: Sequence[np.ndarray], pause: float, rank: int, ranks: int
) -> None:
    send.send("ready")
    send.send(write(folder, rows, Teacher(whole_batch=True, pause=pause), rank=rank, ranks=ranks))


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files below the folder, by relative path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def read_rows(reader: CacheReader, rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in reader(padded(rows)).items() if isinstance(value, torch.Tensor)}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
