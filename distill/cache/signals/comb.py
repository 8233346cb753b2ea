"""Systematic sampling over a large vocabulary on the CPU: one compiled, parallel pass over the logits.

The loops use LANES independent accumulators where in a plain sum or maximum each step would wait for the previous one.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import float32, njit

LANES = 64
_BLOCK = 4 * LANES  # ids whose masses are summed as one block
LOG2_E = 1.4426950408889634
CHEBYSHEV = np.polynomial.chebyshev.Chebyshev.interpolate(lambda f: 2.0**f, 6, domain=[0, 1])
# Polynomial for 2^f on [0, 1), with a relative error below 1e-7 before rounding
C0, C1, C2, C3, C4, C5, C6 = CHEBYSHEV.convert(kind=np.polynomial.Polynomial).coef.astype(np.float32)


def sample_with_comb(
    logits: np.ndarray, offsets: np.ndarray, draws: int, temperature: float, threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws ids from softmax(logits / temperature), float32 [positions, vocabulary], using a comb of `draws` teeth.

    Returns ids int32 (ascending within a position) and counts int32, both concatenated over the positions, and the
    number of ids of each position, int32; 0 where the logits contain NaN or +inf, or are all -inf.
    """
    ids, counts = np.empty((2, len(logits), draws), np.int32)
    sizes = np.empty(len(logits), np.int32)
    scale = np.float32(LOG2_E / temperature)

    def sample_part(part: slice) -> None:
        _draw_ids(logits[part], offsets[part], draws, scale, ids[part], counts[part], sizes[part])

    step = -(-len(logits) // threads) or 1
    parts = [slice(start, start + step) for start in range(0, len(logits), step)]
    if len(parts) == 1:
        sample_part(parts[0])
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(sample_part, parts))
    used = np.arange(draws) < sizes[:, None]
    return ids[used], counts[used], sizes


@njit(nogil=True, cache=True)
def _draw_ids(
    logits: np.ndarray,
    offsets: np.ndarray,
    draws: int,
    scale: np.float32,
    ids: np.ndarray,
    counts: np.ndarray,
    sizes: np.ndarray,
) -> None:
    """Fills ids and counts [positions, draws] and sizes [positions]."""
    width = logits.shape[1]
    blocks = (width + _BLOCK - 1) // _BLOCK
    masses = np.zeros(blocks * _BLOCK, np.float32)
    sums = np.empty(blocks, np.float32)
    lanes = np.empty(LANES, np.float32)
    for position in range(len(logits)):
        row = logits[position]
        top = _find_maximum(row, lanes)
        sizes[position] = 0
        if not np.isfinite(top):
            continue
        _compute_powers(row, scale, top, masses)
        _sum_blocks(masses, lanes, sums)
        sizes[position] = _find_hits(masses, sums, offsets[position], draws, ids[position], counts[position])


@njit(nogil=True, cache=True)
def _find_maximum(row: np.ndarray, lanes: np.ndarray) -> np.float32:
    """Returns the maximum, ignoring NaN."""
    lanes[:] = -np.inf
    whole = len(row) // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        for i in range(LANES):
            a, b = row[start + i], row[start + LANES + i]
            c, d = row[start + 2 * LANES + i], row[start + 3 * LANES + i]
            a, c = a if a > b else b, c if c > d else d
            a = a if a > c else c
            lanes[i] = a if a > lanes[i] else lanes[i]
    top: np.float32 = float32(-np.inf)
    for value in lanes:
        top = value if value > top else top
    for value in row[whole:]:
        top = value if value > top else top
    return top


@njit(nogil=True, cache=True, fastmath={"contract"})
def _compute_powers(row: np.ndarray, scale: np.float32, top: np.float32, out: np.ndarray) -> None:
    """Fills `out` with 2^((row - top) · scale): 0 below 2^-126, and NaN for NaN."""
    for i in range(len(row)):
        y = (row[i] - top) * scale
        y = float32(-127) if y < float32(-127) else y
        whole = np.floor(y)
        f = y - whole
        power = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * (C5 + f * C6)))))
        out[i] = power * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(nogil=True, cache=True)
def _sum_blocks(masses: np.ndarray, lanes: np.ndarray, sums: np.ndarray) -> None:
    """Fills `sums` [blocks] with the total mass of each block."""
    for block in range(len(sums)):
        start = block * _BLOCK
        for i in range(LANES):
            lanes[i] = (masses[start + i] + masses[start + LANES + i]) + (
                masses[start + 2 * LANES + i] + masses[start + 3 * LANES + i]
            )
        for i in range(16):
            lanes[i] = (lanes[i] + lanes[i + 16]) + (lanes[i + 32] + lanes[i + 48])
        total = float32(0)
        for i in range(16):
            total += lanes[i]
        sums[block] = total


@njit(nogil=True, cache=True)
def _find_hits(
    masses: np.ndarray, sums: np.ndarray, offset: float, draws: int, ids: np.ndarray, counts: np.ndarray
) -> int:
    """Passes over the cumulative masses and writes the ids that the teeth hit; returns the number of ids, 0 for NaN."""
    total = 0.0
    for mass in sums:
        total += mass
    if np.isnan(total):
        return 0
    step = total / draws
    tooth, passed = offset * step, 0.0
    drawn, size, last = 0, 0, 0
    for block in range(len(sums)):
        if passed + sums[block] > tooth:
            inside = passed
            for i in range(block * _BLOCK, (block + 1) * _BLOCK):
                if masses[i] == 0:
                    continue
                inside += masses[i]
                last, hits = i, 0
                while drawn < draws and tooth < inside:
                    hits += 1
                    drawn += 1
                    tooth = (drawn + offset) * step
                if hits > 0:
                    ids[size], counts[size] = i, hits
                    size += 1
        passed += sums[block]
    if drawn < draws:  # rounding moved the last teeth past the end
        if size == 0 or ids[size - 1] != last:
            ids[size], counts[size] = last, 0
            size += 1
        counts[size - 1] += draws - drawn
    return size
