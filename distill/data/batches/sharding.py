"""Sharding of batches across processes, with the weights that make losses means over the whole batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.data.batches.loss_mask import COUNTED, loss_counts
from distill.losses.logits import IGNORED

# Fields with an entry for each token.
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "positions", "labels", "documents", "position_ids")
_HALVINGS = 60  # of the interval in which the shortest time is sought


def divide_rows(lengths: np.ndarray, speeds: Sequence[float]) -> list[np.ndarray]:
    """Returns the rows of each process, so that the last one is done as early as possible.

    Rows are sorted by length, and each process gets consecutive ones, which it pads to the longest of them; its time is
    their number times that length, over its speed. A process may get no row.

    Args:
        lengths: Tokens of each row, int64 [rows].
        speeds: Tokens that each process computes in some time; only their ratios matter.
    """
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order].astype(np.float64)
    # With the same time for all, a process can do as many of the next rows as it has time for.
    shortest, longest = 0.0, len(ascending) * float(ascending[-1]) / max(speeds)
    for _ in range(_HALVINGS):
        time = (shortest + longest) / 2
        if _find_ends(ascending, speeds, time)[-1] == len(ascending):
            longest = time
        else:
            shortest = time
    ends = _find_ends(ascending, speeds, longest)
    ends[-1] = len(ascending)  # rounding may leave the last row to nobody, even at the longest time
    return [np.sort(order[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _find_ends(ascending: np.ndarray, speeds: Sequence[float], time: float) -> list[int]:
    """Returns how many rows are done by the first process, by the first two, and so on, if each takes this time."""
    ends, done = [], 0
    for speed in speeds:
        costs = np.arange(1, len(ascending) - done + 1) * ascending[done:]
        done += int(np.searchsorted(costs, time * speed, side="right"))
        ends.append(done)
    return ends


def shard_batch(
    batch: Mapping[str, Tensor], rank: int, ranks: int, speeds: Sequence[float] | None = None
) -> dict[str, Any]:
    """Returns a process's rows of a batch, as `divide_rows` divides them, padded to the longest of them.

    With more than one process, two entries are added: `batch_rows`, the number of rows in the whole batch, and
    `shares`: for each count, this process's part of the total, times `ranks`. A mean over these rows times its share,
    averaged over the processes, is the mean over the whole batch, however uneven the rows are. A process without rows
    gets the shortest row of the batch, with shares of 0.

    Args:
        batch: Padded batch with labels.
        rank: Number of this process.
        ranks: Number of processes.
        speeds: Speeds of the processes; equal if None.
    """
    if ranks == 1:
        return dict(batch)
    whole, size = loss_counts(batch), len(batch["labels"])
    mask = batch["attention_mask"].bool()
    lengths = count_columns(mask)
    selected = torch.from_numpy(divide_rows(lengths, speeds or [1.0] * ranks)[rank])
    is_empty = len(selected) == 0
    if is_empty:
        selected = torch.from_numpy(lengths).argmin()[None]
    longest = int(lengths[selected].max())
    shard: dict[str, Any] = {name: value[selected] for name, value in batch.items()}
    shard |= {name: shard[name][:, :longest] for name in fields_of_tokens(batch)}
    if is_empty:
        shard["labels"] = torch.full_like(shard["labels"], IGNORED)
    counts = dict.fromkeys(whole, 0) if is_empty else loss_counts(shard)
    shard["batch_rows"] = size
    shard["shares"] = {name: ranks * counts[name] / max(whole[name], 1) for name in whole}
    return shard


def fields_of_tokens(batch: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the fields [rows, length] of a batch; labels are one if each token has its own."""
    shape = batch["attention_mask"].shape
    fields = [name for name in _OF_TOKENS if name in batch and batch[name].shape == shape]
    # Floats are several labels of each text, whose number may be the padded length by chance.
    return [name for name in fields if not batch[name].is_floating_point()]


def count_columns(mask: Tensor) -> np.ndarray:
    """Returns the number of columns of each row up to its last token, int64 [rows]; padding may be inside."""
    columns = torch.arange(1, mask.shape[1] + 1)
    return np.asarray((mask * columns).amax(1).clamp(min=1).numpy(), np.int64)


def weigh_batch(batch: dict[str, Any], weight: float) -> None:
    """Multiplies the loss terms of a batch by a weight, in its `shares`."""
    batch["shares"] = {name: weight * share for name, share in batch.get("shares", dict.fromkeys(COUNTED, 1.0)).items()}
