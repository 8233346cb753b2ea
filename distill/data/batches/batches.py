"""Batches of texts of similar length, in an order that depends only on the seed and the epoch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from distill.data.batches.encode import Batch
from distill.data.batches.pinning import pin_batch
from distill.data.batches.prefetch import Prefetcher, WaitTimer
from distill.data.batches.rank_speeds import RankSpeeds
from distill.data.batches.sampling import RowSampler
from distill.data.batches.segments import cut_segment
from distill.data.batches.sharding import shard_batch, weigh_batch

Signals = Callable[[Batch], Mapping[str, object]]
WHOLE_ROWS = (0, 1)  # the segment of a process that has all positions of its rows
POOL = 50  # batches that are sorted by length together: wide enough to waste little, narrow enough to stay random


def epoch_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Shuffles the rows, sorts pools of POOL batches by length, splits them into batches and shuffles the batches."""
    rng = np.random.default_rng([seed, epoch])
    rows = rng.permutation(len(lengths))
    batches: list[np.ndarray] = []
    for start in range(0, len(rows), batch_size * POOL):
        pool = rows[start : start + batch_size * POOL]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def token_order(lengths: np.ndarray, tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Returns batches of at most `tokens` tokens with padding, longer rows alone, in shuffled order.

    Rows are sorted by their length rounded up to four binary digits, and are shuffled among those of
    the same rounded length, so that every epoch has batches of the same sizes, with other rows in them.
    """
    rng = np.random.default_rng([seed, epoch])
    rows, rounded = rng.permutation(len(lengths)), round_lengths(lengths)
    rows = rows[np.argsort(rounded[rows], kind="stable")]
    batches = np.split(rows, split_by_tokens(rounded[rows], tokens))
    return [batches[i] for i in rng.permutation(len(batches))]


def round_lengths(lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths rounded up to four binary digits: by less than an eighth, and not at all up to 16."""
    step = 2 ** np.maximum(np.frexp(lengths)[1] - 4, 0).astype(lengths.dtype)
    rounded: np.ndarray = -(-lengths // step) * step
    return rounded


def split_by_tokens(ascending: np.ndarray, tokens: int) -> list[int]:
    """Returns the first row of each batch but the first, for rows sorted by length.

    A batch's last row is its longest, so it has rows times that length.
    """
    starts, start = [], 0
    for row, length in enumerate(ascending.tolist()):
        if row > start and (row - start + 1) * length > tokens:
            starts.append(row)
            start = row
    return starts


def length_order(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Returns batches of all rows sorted by length, longest last, for evaluation."""
    rows = np.argsort(lengths, kind="stable")
    return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]


class EncodedRows(Protocol):
    """Samples ready to be padded: `Encoded`, `LanguageBlocks`, `MaskedBlocks`."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample, int64 [samples]."""

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Returns a padded batch of samples; `epoch` selects their masks, if there are any."""


class TrainBatches:
    """Training batches, one epoch per iteration.

    The whole state is one number, so that an interrupted run resumes at the next batch. Lightning
    saves and restores the state through `state_dict`. Under data parallelism each process takes its rows of every batch
    (see `shard_batch`), so the number of processes may change when a run is resumed.

    Args:
        data: The samples.
        batch_size: Rows per batch, over all processes.
        pad_id: Id of the padding.
        batch_tokens: Tokens with padding per batch, over all processes, instead of rows; 0 counts rows. Batches then
            have weights in proportion to their rows (in their `shares`), so that every sample has the same.
        seed: Seed of the order.
        rank, ranks: Rank of this process and number of the processes that share the rows of each batch.
        segment: Number of this process's segment of each row's positions, and number of segments, see `cut_segment`.
        signals: Computes the teacher's signals of a batch, which are added under `signals`.
        threads: Threads that prepare batches ahead of the step; 0 prepares each batch on request.
        sampler: Chooses the rows of each epoch; None: every row once. With it, batches count rows.
        pinned_for: GPU for which the threads copy batches into pinned memory, from which they can be moved to it while
            it computes; None for any other device.
        speeds: Speeds of the processes, by which rows are divided among them; equal if None.
    """

    def __init__(
        self,
        data: EncodedRows,
        batch_size: int,
        pad_id: int,
        *,
        batch_tokens: int = 0,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        segment: tuple[int, int] = WHOLE_ROWS,
        signals: Signals | None = None,
        threads: int = 0,
        sampler: RowSampler | None = None,
        pinned_for: torch.device | None = None,
        speeds: RankSpeeds | None = None,
    ):
        self.data, self.batch_size, self.pad_id = data, batch_size, pad_id
        self.batch_tokens = 0 if sampler is not None else batch_tokens  # drawn rows differ in length between epochs
        self.seed, self.rank, self.ranks = seed, rank, ranks
        self.segment = segment
        self.signals, self.threads, self.waiting = signals, threads, WaitTimer()
        self.sampler, self.pinned_for, self.speeds = sampler, pinned_for, speeds
        self.position = 0  # batches yielded since the start of the first epoch

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
        if not self.batch_tokens:
            rows = len(self.data) if self.sampler is None else self.sampler.count
            return -(-rows // self.batch_size)
        return len(split_by_tokens(np.sort(round_lengths(self.data.lengths)), self.batch_tokens)) + 1

    def order_rows(self, epoch: int) -> list[np.ndarray]:
        """Returns the rows of each batch of an epoch."""
        lengths = self.data.lengths
        if self.sampler is not None:
            drawn = self.sampler.draw(epoch)
            return [drawn[batch] for batch in epoch_order(lengths[drawn], self.batch_size, self.seed, epoch)]
        if self.batch_tokens:
            return token_order(lengths, self.batch_tokens, self.seed, epoch)
        return epoch_order(lengths, self.batch_size, self.seed, epoch)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = divmod(self.position, len(self))
        if self.sampler is not None and start == 0:
            self.sampler.begin_epoch(epoch)
        order = self.order_rows(epoch)
        requests = ((rows, epoch, number) for number, rows in enumerate(order[start:], self.position))
        for batch in Prefetcher(self.build_batch, requests, threads=self.threads, waiting=self.waiting):
            self.position += 1
            yield batch

    def build_batch(self, request: tuple[np.ndarray, int, int]) -> Batch:
        """Returns this process's share of a batch, with signals.

        Args:
            request: The batch's rows, the epoch, and the batch's number from the start of the training.
        """
        rows, epoch, number = request
        whole = self.data.collate(rows, self.pad_id, epoch)
        weights = self.sampler.find_weights(rows) if self.sampler is not None else None
        if weights is not None:
            whole["row_weights"] = torch.from_numpy(weights).float()
        speeds = None if self.speeds is None else self.speeds.find(number)
        batch = shard_batch(whole, self.rank, self.ranks, speeds)
        if self.batch_tokens:
            weigh_batch(batch, len(rows) * len(self) / len(self.data))
        if self.signals is not None:
            batch["signals"] = self.signals(batch)
        batch = cut_segment(batch, *self.segment)
        return batch if self.pinned_for is None else pin_batch(batch, self.pinned_for)

    def state_dict(self) -> dict[str, int]:
        """Returns the number of batches yielded since the start of the first epoch."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores what `state_dict` returned."""
        self.position = state["position"]


class EvalBatches:
    """Evaluation batches: every row once, sorted by length; each process takes its part of every batch.

    Args:
        data, batch_size, pad_id, rank, ranks, segment: As in `TrainBatches`.
    """

    def __init__(
        self,
        data: EncodedRows,
        batch_size: int,
        pad_id: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        segment: tuple[int, int] = WHOLE_ROWS,
    ):
        self.data, self.pad_id, self.rank, self.ranks, self.segment = data, pad_id, rank, ranks, segment
        self.order = length_order(data.lengths, batch_size)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self.order:
            shard = shard_batch(self.data.collate(rows, self.pad_id), self.rank, self.ranks)
            yield cut_segment(shard, *self.segment)
