"""The k likeliest ids of each position, their log-probabilities on a grid, and the total probability of all others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numba import njit, uint64
from torch import Tensor

from distill.cache.signals import rans
from distill.cache.signals.checks import check_finite_values, check_width
from distill.cache.signals.signal import Codebook, Signal, SignalMask, SignalRow, TeacherOutputs, at_positions
from distill.errors import InputError
from distill.losses.teacher_signals import TeacherSignals

LEVELS = 1024  # of the grid; lower probabilities are clamped to its end
CLASSES = 16  # of ids by frequency: frequent ids have larger probabilities
_SMOOTHING = 0.02


@dataclass(frozen=True)
class TopK(Signal):
    """Log-probabilities rounded to the nearest multiple of `step`; the tail is one more number on the same grid.

    Truncating a distribution at k biases the target towards the top: the tail's mass is stored, but not its
    distribution within the tail.

    Args:
        k: Ids per position.
        step: Grid of the log-probabilities in nats: a probability is off by at most a factor of exp(step / 2), and by
            as much again because all of them are normalized to sum to 1.
        temperature: Divides the teacher's logits first.
    """

    kind: ClassVar[str] = "topk"
    k: int = 64
    step: float = 0.125
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.k <= min(self.width, 4096):
            raise InputError(f"keep.k: expected 1 to {min(self.width, 4096)}, found {self.k}")
        if not self.step > 0 or not self.temperature > 0:
            raise InputError(
                f"keep.step, keep.temperature: expected more than 0, found {self.step} and {self.temperature}"
            )

    def nominal_bytes(self) -> float:
        """Returns the approximate bytes per position."""
        return 1.8 * self.k

    def rows(self, outputs: TeacherOutputs) -> list[SignalRow]:
        """Returns ids int32 [positions, k] ascending, their levels int32 [positions, k], the tail's [positions]."""
        logits = at_positions(outputs.tensors["logits"], outputs.mask.positions).float() / self.temperature
        check_width("logits", logits, self.width)
        values, ids = logits.topk(self.k, -1)
        # Not `logsumexp`: for logits of 150 it is off by 1e-5, and a confident teacher would seem to have a tail.
        log_mass = (logits - values[:, :1]).exp_().sum(-1, keepdim=True).log_()
        log_probs = values - values[:, :1] - log_mass
        check_finite_values("logits", log_probs[:, :1], outputs.keys)
        ids, order = ids.sort(-1)
        tail = torch.log1p(-log_probs.exp().sum(-1).clamp(max=1))
        columns = (ids.int(), self._quantize(log_probs.gather(-1, order)), self._quantize(tail))
        lengths = outputs.mask.positions.sum(1).tolist()
        samples = zip(*(c.cpu().split(lengths) for c in columns), strict=True)
        return [tuple(part.numpy() for part in sample) for sample in samples]

    def _quantize(self, log_probs: Tensor) -> Tensor:
        """Returns the grid levels int32 of log-probabilities."""
        return (log_probs / -self.step).round().clamp(0, LEVELS - 1).int()

    def fit(self, rows: Sequence[SignalRow]) -> dict[str, np.ndarray]:
        """Returns the frequency tables of ids, floors, tails, and levels above the floor by class of the id."""
        ids, levels, tails = (np.concatenate(column) for column in zip(*rows, strict=True))
        starts = rans.build_id_table(ids.ravel(), self.width)
        floors = levels.max(1)
        above = np.zeros((CLASSES, LEVELS))
        np.add.at(above, (classify_ids(rans.FrequencyTable(starts))[ids], floors[:, None] - levels), 1)
        small = {"floors": np.bincount(floors, minlength=LEVELS), "tails": np.bincount(tails, minlength=LEVELS)}
        tables = {name: rans.build_table(counts + _SMOOTHING, rans.SMALL_BITS) for name, counts in small.items()}
        return {
            "ids": starts,
            **tables,
            "above": np.stack([rans.build_table(r + _SMOOTHING, rans.SMALL_BITS) for r in above]),
        }

    def encode(self, row: SignalRow, codebook: Codebook) -> bytes:
        """Returns the coded ids, levels and tails of all positions."""
        stack = np.empty(row[0].size * 3 + 3 * len(row[0]) + 8, np.uint32)
        classes = classify_ids(codebook["ids"])
        tables = (codebook[name].starts for name in ("floors", "tails", "above"))
        return rans.pack_record(*encode(*row, *codebook["ids"].encoding_arrays, classes, *tables, stack))

    def decode(self, records: Sequence[memoryview], mask: SignalMask, codebook: Codebook) -> TeacherSignals:
        """Returns {"ids" int64 [positions, k], "log_probs" float32 [positions, k], "tail" float32 [positions]}.

        The probabilities of the ids and the tail sum to 1 at each position.
        """
        lengths = mask.positions.sum(1).tolist()
        ids, levels = np.empty((sum(lengths), self.k), np.int64), np.empty((sum(lengths), self.k), np.int32)
        tails = np.empty(sum(lengths), np.int32)
        classes = classify_ids(codebook["ids"])
        small = [array for name in ("floors", "tails", "above") for array in codebook[name].decoding_arrays[:2]]
        first = 0
        for record, length in zip(records, lengths, strict=True):
            part = slice(first, first + length)
            decode(
                *rans.unpack_record(record),
                *codebook["ids"].decoding_arrays,
                classes,
                *small,
                ids[part],
                levels[part],
                tails[part],
            )
            first += length
        # Normalized together: near 1 the grid is too coarse for the tail alone to determine the small mass of the
        # stored ids, but their levels do.
        grid = np.hstack([levels, tails[:, None]]).astype(np.float32) * np.float32(-self.step)
        grid[tails == LEVELS - 1, -1] = -np.inf
        # NumPy: this runs on a background thread during training, where PyTorch would start threads of its own.
        grid -= grid.max(1, keepdims=True)
        grid -= np.log(np.exp(grid).sum(1, keepdims=True))
        return {
            "ids": torch.from_numpy(ids),
            "log_probs": torch.from_numpy(grid[:, :-1]),
            "tail": torch.from_numpy(np.exp(grid[:, -1])),
        }


def classify_ids(ids: rans.FrequencyTable) -> np.ndarray:
    """Returns each id's class by the logarithm of its frequency, int8 [width]."""
    return ids.magnitudes.clip(max=CLASSES - 1)


@njit(nogil=True, cache=True)
def encode(
    ids: np.ndarray,
    levels: np.ndarray,
    tails: np.ndarray,
    id_starts: np.ndarray,
    bits: rans.Word,
    classes: np.ndarray,
    floor_starts: np.ndarray,
    tail_starts: np.ndarray,
    above_starts: np.ndarray,
    stack: np.ndarray,
) -> tuple[rans.Word, np.ndarray, int]:
    """Codes every position, the last first; a decoder pops, per position: floor, tail, ids, levels above the floor."""
    state, top, small = rans.START, 0, uint64(rans.SMALL_BITS)
    items = np.empty(ids.shape[1], np.int64)
    for position in range(len(ids) - 1, -1, -1):
        floor = levels[position].max()
        for i in range(ids.shape[1] - 1, -1, -1):
            row = above_starts[classes[ids[position, i]]]
            state, top = rans.push_symbol(state, stack, top, floor - levels[position, i], row, small)
        items[:] = ids[position]
        state, top = rans.push_set(state, stack, top, items, len(items), id_starts, bits)
        state, top = rans.push_symbol(state, stack, top, tails[position], tail_starts, small)
        state, top = rans.push_symbol(state, stack, top, floor, floor_starts, small)
    return state, stack, top


@njit(nogil=True, cache=True)
def decode(
    state: rans.Word,
    stack: np.ndarray,
    top: int,
    id_starts: np.ndarray,
    id_lookup: np.ndarray,
    bits: rans.Word,
    classes: np.ndarray,
    floor_starts: np.ndarray,
    floor_lookup: np.ndarray,
    tail_starts: np.ndarray,
    tail_lookup: np.ndarray,
    above_starts: np.ndarray,
    above_lookup: np.ndarray,
    ids: np.ndarray,
    levels: np.ndarray,
    tails: np.ndarray,
) -> None:
    """Fills ids [positions, k] int64, levels [positions, k] int32 and tails [positions] int32."""
    small = uint64(rans.SMALL_BITS)
    for position in range(len(ids)):
        floor, state, top = rans.pop_symbol(state, stack, top, floor_starts, floor_lookup, small)
        tails[position], state, top = rans.pop_symbol(state, stack, top, tail_starts, tail_lookup, small)
        state, top = rans.pop_set(state, stack, top, ids[position], ids.shape[1], id_starts, id_lookup, bits)
        for i in range(ids.shape[1]):
            kind = classes[ids[position, i]]
            above, state, top = rans.pop_symbol(state, stack, top, above_starts[kind], above_lookup[kind], small)
            if above > floor:
                raise ValueError("a probability above 1")
            levels[position, i] = floor - above
    if state != rans.START or top != 0:
        raise ValueError("the record does not end with its last position")
