"""Sampled distributions: a few ids per position, drawn in proportion to the teacher's probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from numba import njit, uint64
from torch import Tensor

from distill.cache.signals import rans
from distill.cache.signals.checks import check_width, non_finite_error
from distill.cache.signals.comb import sample_with_comb
from distill.cache.signals.signal import Codebook, Signal, SignalMask, SignalRow, TeacherOutputs, at_positions
from distill.errors import InputError
from distill.losses.teacher_signals import TeacherSignals

_BLOCK = 64  # ids whose masses are summed as one block
CONTEXTS = 8
_SMOOTHING = 0.1


@dataclass(frozen=True)
class Sampled(Signal):
    """`draws` ids per position by systematic sampling; an id drawn c times has weight c / draws.

    A single uniform number shifts a comb of `draws` equal steps over the cumulative distribution. An id of probability
    p is hit floor(p · draws) or ceil(p · draws) times, p · draws on average: every weight is unbiased, and its variance
    is below that of independent draws.

    Args:
        draws: Number of teeth of the comb; the number of distinct ids per position is lower.
        temperature: Divides the teacher's logits before sampling.
        seed: A different seed gives another draw from the same distributions.

    Source: Anshumann et al. 2025, sparse logit sampling (arXiv 2503.16870), which draws independently; the comb is
    Madow 1949's systematic sampling.
    """

    kind: ClassVar[str] = "sampled"
    draws: int = 24
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.draws <= 4096:
            raise InputError(f"keep.draws: expected 1 to 4096 draws per position, found {self.draws}")
        if not self.temperature > 0:
            raise InputError(f"keep.temperature: expected more than 0, found {self.temperature}")

    def nominal_bytes(self) -> float:
        """Returns the approximate bytes per position."""
        return 1.4 * self.draws

    def rows(self, outputs: TeacherOutputs) -> list[SignalRow]:
        """Returns ids and counts, both concatenated over positions, and each position's number of ids, all int32."""
        mask = outputs.mask.positions
        logits, lengths = at_positions(outputs.tensors["logits"], mask), mask.sum(1).tolist()
        check_width("logits", logits, self.width)
        keys = zip(outputs.keys, lengths, strict=True)
        offsets = np.concatenate([draw_offsets(key, length, self.seed) for key, length in keys])
        ids, counts, sizes = self.sample_ids(logits, offsets)
        if not sizes.all():
            raise non_finite_error("logits", np.flatnonzero(sizes == 0), len(sizes), outputs.keys)
        rows = np.cumsum([0, *lengths])
        ends = np.concatenate([[0], np.cumsum(sizes)])[rows]
        return [
            (ids[ends[i] : ends[i + 1]], counts[ends[i] : ends[i + 1]], sizes[rows[i] : rows[i + 1]])
            for i in range(len(lengths))
        ]

    def sample_ids(self, logits: Tensor, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `sample_with_comb` of the logits, computed on their device."""
        if logits.device.type == "cpu":
            values = logits.detach().float().contiguous().numpy()
            return sample_with_comb(values, offsets, self.draws, self.temperature, torch.get_num_threads())
        return systematic_sample(
            logits.float() / self.temperature, torch.from_numpy(offsets).to(logits.device), self.draws
        )

    def fit(self, rows: Sequence[SignalRow]) -> dict[str, np.ndarray]:
        """Returns the frequency tables of ids, numbers of ids, and counts by context."""
        sizes = np.zeros(self.draws + 1)
        extras = np.zeros((CONTEXTS, self.draws))
        for _, counts, row_sizes in rows:
            _count_symbols(counts, row_sizes, self.draws, sizes, extras)
        return {
            "ids": rans.build_id_table(np.concatenate([ids for ids, _, _ in rows]), self.width),
            "sizes": rans.build_table(sizes + _SMOOTHING, rans.SMALL_BITS),
            "extras": np.stack([rans.build_table(row + _SMOOTHING, rans.SMALL_BITS) for row in extras]),
        }

    def encode(self, row: SignalRow, codebook: Codebook) -> bytes:
        """Returns the coded ids and counts of all positions."""
        stack = np.empty(len(row[0]) * 3 + len(row[2]) + 8, np.uint32)
        tables = (*codebook["ids"].encoding_arrays, codebook["sizes"].starts, codebook["extras"].starts)
        return rans.pack_record(*encode(*row, self.draws, *tables, stack))

    def decode(self, records: Sequence[memoryview], mask: SignalMask, codebook: Codebook) -> TeacherSignals:
        """Returns {"ids" int64 [positions, k], "weights" float32 [positions, k]}, padded with id 0 of weight 0."""
        lengths = mask.positions.sum(1).tolist()
        tables = (
            *codebook["ids"].decoding_arrays,
            *codebook["sizes"].decoding_arrays[:2],
            *codebook["extras"].decoding_arrays[:2],
        )
        ids, counts = np.zeros((sum(lengths), self.draws), np.int64), np.zeros((sum(lengths), self.draws), np.float32)
        first = widest = 0
        for record, length in zip(records, lengths, strict=True):
            part = slice(first, first + length)
            widest = max(widest, decode(*rans.unpack_record(record), self.draws, *tables, ids[part], counts[part]))
            first += length
        return {
            "ids": torch.from_numpy(ids[:, :widest].copy()),
            "weights": torch.from_numpy(counts[:, :widest] / np.float32(self.draws)),
        }


def draw_offsets(key: bytes, length: int, seed: int) -> np.ndarray:
    """Returns a uniform number in [0, 1) per position, float64 [length], from the key and the seed (SplitMix64)."""
    start = np.frombuffer(key, "<u8", 1)[0] ^ np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    with np.errstate(over="ignore"):
        x = start + np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    offsets: np.ndarray = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return offsets


def systematic_sample(
    logits: Float[Tensor, "positions vocabulary"], offsets: Float[Tensor, "positions"], draws: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Performs `sample_with_comb` in PyTorch on an accelerator, with logits already divided by the temperature."""
    finite = logits.amax(-1).isfinite()
    masses = torch.softmax(logits.masked_fill(~finite[:, None], 0), -1)
    parts = torch.nn.functional.pad(masses, (0, -masses.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    blocks = parts.sum(-1).double()
    edges = blocks.cumsum(-1)
    teeth = torch.arange(draws, device=logits.device, dtype=torch.float64)
    marks = (teeth + offsets[:, None]) / draws * edges[:, -1:]
    block = torch.searchsorted(edges, marks, right=True).clamp_(max=edges.shape[1] - 1)
    offset_in_block = marks - (edges - blocks).gather(1, block)
    inside = parts.gather(1, block[..., None].expand(-1, -1, _BLOCK))
    within = torch.searchsorted(inside.double().cumsum(-1), offset_in_block[..., None], right=True)[..., 0]
    # If rounding leads past the block's end, take its likeliest id, never one without mass.
    within = torch.where(within < _BLOCK, within, inside.argmax(-1))
    rows = torch.arange(len(logits), device=logits.device)[:, None] * masses.shape[1]
    chosen, counts = torch.unique_consecutive((block * _BLOCK + within).sort(-1).values + rows, return_counts=True)
    owner = chosen // masses.shape[1]
    keep = finite[owner]
    sizes = torch.bincount(owner[keep], minlength=len(logits))
    samples = (chosen - owner * masses.shape[1])[keep], counts[keep], sizes
    return tuple(part.to(torch.int32).cpu().numpy() for part in samples)  # type: ignore[return-value]


@njit(nogil=True, cache=True)
def _find_context(extra: int, remaining: int) -> int:
    """Returns the context of a count: the remaining draws per remaining id in powers of two, 0 to CONTEXTS - 1."""
    level, share = 0, extra * 4 // remaining
    while share > 0 and level < CONTEXTS - 1:
        share >>= 1
        level += 1
    return level


@njit(nogil=True, cache=True)
def _count_symbols(
    counts: np.ndarray, sizes: np.ndarray, draws: int, size_weights: np.ndarray, extra_weights: np.ndarray
) -> None:
    """Adds the symbols that `encode` would code to the histograms."""
    begin = 0
    for size in sizes:
        size_weights[size] += 1
        extra = draws - size
        for i in range(size - 1):
            if extra == 0:
                break
            more = counts[begin + i] - 1
            extra_weights[_find_context(extra, size - i), more] += 1
            extra -= more
        begin += size


@njit(nogil=True, cache=True)
def encode(
    ids: np.ndarray,
    counts: np.ndarray,
    sizes: np.ndarray,
    draws: int,
    id_starts: np.ndarray,
    bits: rans.Word,
    size_starts: np.ndarray,
    extra_starts: np.ndarray,
    stack: np.ndarray,
) -> tuple[rans.Word, np.ndarray, int]:
    """Codes every position, the last first; a decoder pops, per position: number of ids, counts but the last, ids."""
    state, top, small = rans.START, 0, uint64(rans.SMALL_BITS)
    items, contexts = np.empty(draws, np.int64), np.empty(draws, np.int64)
    end = len(ids)
    for position in range(len(sizes) - 1, -1, -1):
        size = sizes[position]
        begin = end - size
        items[:size] = ids[begin:end]
        state, top = rans.push_set(state, stack, top, items, size, id_starts, bits)
        extra, coded = draws - size, 0
        while coded < size - 1 and extra > 0:
            contexts[coded] = _find_context(extra, size - coded)
            extra -= counts[begin + coded] - 1
            coded += 1
        for i in range(coded - 1, -1, -1):
            state, top = rans.push_symbol(state, stack, top, counts[begin + i] - 1, extra_starts[contexts[i]], small)
        state, top = rans.push_symbol(state, stack, top, size, size_starts, small)
        end = begin
    return state, stack, top


@njit(nogil=True, cache=True)
def decode(
    state: rans.Word,
    stack: np.ndarray,
    top: int,
    draws: int,
    id_starts: np.ndarray,
    id_lookup: np.ndarray,
    bits: rans.Word,
    size_starts: np.ndarray,
    size_lookup: np.ndarray,
    extra_starts: np.ndarray,
    extra_lookup: np.ndarray,
    ids: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Fills the first columns of ids and counts [positions, draws]; returns the largest number of ids of a position."""
    small, widest = uint64(rans.SMALL_BITS), 0
    for position in range(len(ids)):
        size, state, top = rans.pop_symbol(state, stack, top, size_starts, size_lookup, small)
        if size == 0:
            raise ValueError("a position without ids")
        extra = draws - size
        for i in range(size):
            more = extra
            if extra > 0 and i < size - 1:
                kind = _find_context(extra, size - i)
                more, state, top = rans.pop_symbol(state, stack, top, extra_starts[kind], extra_lookup[kind], small)
            counts[position, i] = 1 + more
            extra -= more
            if extra < 0:
                raise ValueError("counts that exceed the number of draws")
        state, top = rans.pop_set(state, stack, top, ids[position], size, id_starts, id_lookup, bits)
        widest = max(widest, size)
    if state != rans.START or top != 0:
        raise ValueError("the record does not end with its last position")
    return widest
