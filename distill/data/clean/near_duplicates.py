"""Near duplicates among texts: MinHash signatures, locality-sensitive hashing, and the exact similarity of candidates.

The share of equal minima of random hash functions estimates the Jaccard similarity of two sets (Broder 1997, "On the
resemblance and containment of documents"), here of runs of SHINGLE characters. A byte of each minimum is kept (Li and
König 2010, "b-Bit minwise hashing"). Texts with an equal band of bytes are candidates (Leskovec et al., Mining of
Massive Datasets, section 3.4), of which those with enough equal bytes are compared exactly: estimates decide only what
is compared.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numba
import numpy as np

from distill.data.sources.text_column import select_texts
from distill.data.splits.overlap import normalize_text

SHINGLE = 5  # characters
BANDS, BAND_BYTES = 20, 4  # at a similarity of 0.8 one pair in 30,000 has no equal band, at 0.6 one in 16
_MARGIN = 0.17  # below the limit of similarity, at which candidates are compared exactly: four standard errors
_BLOCK = 1 << 14  # texts that exist as characters at a time


@dataclass(frozen=True)
class Characters:
    """Normalized texts as characters, one after another.

    Args:
        codes: Code points, uint32 [characters].
        ends: The end of each text, int64 [texts].
    """

    codes: np.ndarray
    ends: np.ndarray

    @staticmethod
    def build(texts: Sequence[str]) -> "Characters":
        """Encodes texts without case and punctuation."""
        plain = [normalize_text(text) for text in texts]
        codes = np.frombuffer("".join(plain).encode("utf-32-le", "surrogatepass"), np.uint32)
        return Characters(codes, np.cumsum(np.fromiter(map(len, plain), np.int64, len(plain))))


def find_near_duplicates(texts: Sequence[str], least: float) -> np.ndarray:
    """Returns for each text the number of an earlier text that it nearly equals and that stays, or -1; int64 [texts].

    A text stays if it nearly equals no earlier text that stays.

    Args:
        texts: The texts.
        least: Jaccard similarity of the sets of SHINGLE characters from which on two texts are near duplicates; 0.5 or
            more.
    """
    pairs = _collect_candidates(compute_signatures(texts), 0, least)
    matches = np.full(len(texts), -1, np.int64)
    for other, row in _select_similar(texts, texts, pairs, least).tolist():
        if matches[row] < 0 and matches[other] < 0:
            matches[row] = other
    return matches


def find_similar(texts: Sequence[str], references: Sequence[str], least: float) -> np.ndarray:
    """Returns for each text the number of the first reference that it nearly equals, or -1; int64 [texts].

    See `find_near_duplicates`.
    """
    first, matches = len(references), np.full(len(texts), -1, np.int64)
    if not first:
        return matches
    signatures = np.concatenate([compute_signatures(references), compute_signatures(texts)])
    pairs = _collect_candidates(signatures, first, least) - [0, first]
    for other, row in _select_similar(references, texts, pairs, least).tolist()[::-1]:
        matches[row] = other
    return matches


def compute_signatures(texts: Sequence[str]) -> np.ndarray:
    """Returns the lowest byte of the minimum of each hash function, uint8 [texts, BANDS x BAND_BYTES]."""
    width = BANDS * BAND_BYTES
    seeds = np.random.default_rng(0).integers(1, 2**63, width).astype(np.uint64) | np.uint64(1)
    signatures = np.empty((len(texts), width), np.uint8)
    row = 0
    for block in _iterate_blocks(texts):
        encoded = Characters.build(block)
        _fill_signatures(encoded.codes, encoded.ends, seeds, signatures[row : row + len(block)])
        row += len(block)
    return signatures


def pair_equal_keys(keys: np.ndarray) -> np.ndarray:
    """Returns (earlier row, row) for rows with equal keys, int64 [pairs, 2].

    Each row is paired with the first of its key and with the one before it; all pairs would be too many.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(keys)]
    starts = np.flatnonzero(is_first)
    leaders = np.repeat(order[starts], np.diff(np.append(starts, len(keys))))
    rows = np.flatnonzero(~is_first)
    by_leader, by_neighbor = leaders[rows], order[rows - 1]
    return np.concatenate([np.stack([by_leader, order[rows]], 1), np.stack([by_neighbor, order[rows]], 1)])


def _collect_candidates(signatures: np.ndarray, first: int, least: float) -> np.ndarray:
    """Returns pairs of rows that may be as similar as `least`, each once, in the order of their second rows.

    If `first` isn't 0, the rows before it are references, and pairs are of a reference and another row.
    """
    rows, packed = len(signatures), [np.array([], np.int64)]
    bands = np.ascontiguousarray(signatures).view(np.uint32)
    for band in range(BANDS):
        pairs = pair_equal_keys(bands[:, band])
        if first:
            pairs = pairs[(pairs[:, 0] < first) & (pairs[:, 1] >= first)]
        chosen = pairs[_count_equal(signatures, pairs) >= (least - _MARGIN) * signatures.shape[1]]
        packed.append(np.unique(chosen[:, 1] * rows + chosen[:, 0]))
    unique = np.unique(np.concatenate(packed))
    return np.stack([unique % max(1, rows), unique // max(1, rows)], 1)


def _iterate_blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while block := list(islice(remaining, _BLOCK)):
        yield block


def _select_similar(earlier: Sequence[str], texts: Sequence[str], pairs: np.ndarray, least: float) -> np.ndarray:
    """Returns the pairs (number in `earlier`, number in `texts`) that are as similar as `least`, int64 [pairs, 2]."""
    similar = [np.empty((0, 2), np.int64)]
    for start in range(0, len(pairs), _BLOCK):
        chosen = pairs[start : start + _BLOCK]
        one, two = (
            Characters.build(select_texts(each, rows)) for each, rows in zip((earlier, texts), chosen.T, strict=True)
        )
        similar.append(chosen[_compare(one.codes, one.ends, two.codes, two.ends) >= least])
    return np.concatenate(similar)


@numba.njit(cache=True)
def _hash_shingle(codes: np.ndarray, start: int, stop: int) -> np.uint64:
    value = np.uint64(1469598103934665603)
    for i in range(start, stop):
        value = (value ^ np.uint64(codes[i])) * np.uint64(1099511628211)
        value ^= value >> np.uint64(29)
    return value


@numba.njit(cache=True)
def _fill_signatures(codes: np.ndarray, ends: np.ndarray, seeds: np.ndarray, signatures: np.ndarray) -> None:
    for row in range(len(ends)):
        start = ends[row - 1] if row else 0
        count = max(1, ends[row] - start - SHINGLE + 1)
        minima = np.full(len(seeds), np.uint64(0xFFFFFFFFFFFFFFFF))
        for shingle in range(count):
            value = _hash_shingle(codes, start + shingle, min(start + shingle + SHINGLE, ends[row]))
            for i in range(len(seeds)):
                mixed = (value ^ seeds[i]) * seeds[i]
                mixed ^= mixed >> np.uint64(32)
                minima[i] = min(minima[i], mixed)
        for i in range(len(seeds)):
            signatures[row, i] = np.uint8(minima[i] & np.uint64(255))


@numba.njit(cache=True)
def _count_equal(signatures: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Returns the number of equal bytes of each pair's signatures, int64 [pairs]."""
    counts = np.zeros(len(pairs), np.int64)
    for i in range(len(pairs)):
        for k in range(signatures.shape[1]):
            counts[i] += signatures[pairs[i, 0], k] == signatures[pairs[i, 1], k]
    return counts


@numba.njit(cache=True)
def _collect_shingles(codes: np.ndarray, start: int, end: int) -> np.ndarray:
    """Returns the sorted hashes of a text's shingles, each once."""
    count = max(1, end - start - SHINGLE + 1)
    values = np.empty(count, np.uint64)
    for i in range(count):
        values[i] = _hash_shingle(codes, start + i, min(start + i + SHINGLE, end))
    values.sort()
    distinct = 1
    for i in range(1, count):
        if values[i] != values[distinct - 1]:
            values[distinct] = values[i]
            distinct += 1
    return values[:distinct]


@numba.njit(cache=True)
def _compare(codes: np.ndarray, ends: np.ndarray, other_codes: np.ndarray, other_ends: np.ndarray) -> np.ndarray:
    """Returns the Jaccard similarity of the texts of each row, float64 [rows]."""
    similar = np.empty(len(ends))
    for row in range(len(ends)):
        one = _collect_shingles(codes, ends[row - 1] if row else 0, ends[row])
        two = _collect_shingles(other_codes, other_ends[row - 1] if row else 0, other_ends[row])
        i = j = common = 0
        while i < len(one) and j < len(two):
            if one[i] == two[j]:
                common += 1
                i += 1
                j += 1
            elif one[i] < two[j]:
                i += 1
            else:
                j += 1
        similar[row] = common / (len(one) + len(two) - common)
    return similar
