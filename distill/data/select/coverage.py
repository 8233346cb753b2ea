"""Choices of rows that cover the others, by vectors or by difficulty.

Each returns the numbers of the chosen rows in the order in which they are chosen, int64 [count].
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Vectors = Float[Tensor, "rows width"]
CountDone = Callable[[int], object]
_STRATA = 50
_MISSED = 0.05  # chance that a sample of candidates has none of the best ones
_BLOCK = 4096
_NEIGHBORS, _ROWS = 20, 512  # of each row, and rows that are compared with all at a time


def ignore_count(count: int) -> None:
    """Does nothing; takes the place of a progress bar."""


def to_unit_length(vectors: Vectors) -> Vectors:
    """Returns the vectors with length 1."""
    return torch.nn.functional.normalize(vectors.float(), dim=-1)


def choose_centres(vectors: Vectors, count: int, seed: int, advance: CountDone = ignore_count) -> np.ndarray:
    """Returns rows each of which is the farthest from those before it; the first is drawn.

    Source: Sener and Savarese, "Active Learning for Convolutional Neural Networks: A Core-Set Approach" (ICLR 2018),
    algorithm 1, by cosine distance.
    """
    vectors = to_unit_length(vectors)
    chosen = [int(np.random.default_rng(seed).integers(len(vectors)))]
    nearest = vectors @ vectors[chosen[0]]  # the similarity to the nearest chosen row
    while len(chosen) < count:
        nearest[chosen[-1]] = math.inf
        chosen.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, vectors @ vectors[chosen[-1]])
        advance(1)
    return np.array(chosen)


def choose_facilities(vectors: Vectors, count: int, seed: int, advance: CountDone = ignore_count) -> np.ndarray:
    """Returns rows that maximise the sum over all rows of the similarity to the nearest chosen row, greedily.

    Each step takes the best of a sample of candidates that misses all of the best `count` with a chance of 5 %.

    Source: Mirzasoleiman et al., "Lazier than Lazy Greedy" (AAAI 2015), algorithm 1; similarity is (1 + cosine) / 2.
    """
    vectors = to_unit_length(vectors)
    rng = np.random.default_rng(seed)
    sample = max(1, math.ceil(len(vectors) / count * math.log(1 / _MISSED)))
    covered = torch.zeros(len(vectors))
    left, chosen = np.arange(len(vectors)), []
    for _ in range(count):
        places = rng.choice(len(left), min(sample, len(left)), replace=False)
        similar = (1 + vectors @ vectors[torch.from_numpy(left[places])].T) / 2
        gains = (similar - covered[:, None]).clamp(min=0).sum(0)
        best = int(gains.argmax())
        covered = torch.maximum(covered, similar[:, best])
        chosen.append(int(left[places[best]]))
        left = np.delete(left, places[best])
        advance(1)
    return np.array(chosen)


def choose_mixture(vectors: Vectors, count: int, weight: float, advance: CountDone = ignore_count) -> np.ndarray:
    """Returns rows that are typical and differ from each other.

    Each is the one with the largest weight · typicality - (1 - weight) · cosine to the nearest chosen row.

    Source: Carbonell and Goldstein, "The Use of MMR, Diversity-Based Reranking" (SIGIR 1998), equation 1, with the
    typicality of `measure_typicality` in place of the similarity to a query: the mean of all rows lies between the
    classes of a fine-tuned teacher, so that the rows nearest to it are those of which it is least sure.
    """
    vectors = to_unit_length(vectors)
    typical = measure_typicality(vectors)
    chosen = [int(typical.argmax())]
    nearest = vectors @ vectors[chosen[0]]
    while len(chosen) < count:
        value = weight * typical - (1 - weight) * nearest
        value[torch.tensor(chosen)] = -math.inf
        chosen.append(int(value.argmax()))
        nearest = torch.maximum(nearest, vectors @ vectors[chosen[-1]])
        advance(1)
    return np.array(chosen)


def measure_typicality(vectors: Vectors) -> Float[Tensor, "rows"]:
    """Returns the mean cosine of each row to its 20 nearest other rows, of vectors with length 1.

    Source: Hacohen et al., "Active Learning on a Budget" (ICML 2022), section 3.1, with cosines for distances.
    """
    count = min(_NEIGHBORS, len(vectors) - 1)
    blocks = [(block @ vectors.T).topk(count + 1).values[:, 1:] for block in vectors.split(_ROWS)]
    return torch.cat(blocks).mean(-1)


def choose_similar(vectors: Vectors, targets: Float[Tensor, "targets width"], count: int) -> np.ndarray:
    """Returns the rows with the largest cosine to their nearest target."""
    vectors, targets = to_unit_length(vectors), to_unit_length(targets)
    best = torch.cat([(block @ targets.T).max(-1).values for block in vectors.split(_BLOCK)])
    return best.argsort(descending=True, stable=True)[:count].numpy()


def choose_by_difficulty(scores: np.ndarray, count: int, *, hard: bool = True) -> np.ndarray:
    """Returns the hardest rows, or the easiest."""
    return np.argsort(-scores if hard else scores, kind="stable")[:count]


def choose_strata(scores: np.ndarray, count: int, cutoff: float, seed: int) -> np.ndarray:
    """Returns as many rows of each of 50 ranges of difficulty, or all of a range with fewer, without the hardest rows.

    Args:
        scores: Difficulty of each row.
        count: Number of rows to choose.
        cutoff: Share of the hardest rows that is left out, where enough others remain.
        seed: Seed of the draws.

    Source: Zheng et al., "Coverage-centric Coreset Selection for High Pruning Rates" (ICLR 2023), algorithm 1.
    """
    rng = np.random.default_rng(seed)
    left = np.argsort(scores, kind="stable")[: max(count, len(scores) - round(cutoff * len(scores)))]
    low, high = scores[left[0]], scores[left[-1]]
    edges = np.linspace(low, high, _STRATA + 1)[1:-1]
    numbers = np.searchsorted(edges, scores[left], "right")
    return _take_evenly([left[numbers == number] for number in range(_STRATA)], count, rng)


def choose_balanced(classes: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Returns as many rows of each class, or all of a class with fewer."""
    rng = np.random.default_rng(seed)
    return _take_evenly([np.flatnonzero(classes == name) for name in np.unique(classes)], count, rng)


def _take_evenly(groups: Sequence[np.ndarray], count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws as many rows of each group, or all of one with fewer, whose share goes to the larger ones."""
    groups = sorted((group for group in groups if len(group)), key=len)
    chosen: list[np.ndarray] = []
    for index, group in enumerate(groups):
        share = (count - sum(map(len, chosen))) // (len(groups) - index)
        chosen.append(rng.permutation(group)[:share])
    return rng.permutation(np.concatenate(chosen))


def keep_classes(chosen: np.ndarray, classes: np.ndarray, seed: int) -> np.ndarray:
    """Returns the chosen rows with one of each class that has none, in place of the last ones of the largest classes.

    Args:
        chosen: Numbers of rows, the most wanted first.
        classes: The class of every row.
        seed: Seed of the draws of rows of missing classes.
    """
    rng = np.random.default_rng(seed)
    rows = chosen.tolist()
    for missing in np.setdiff1d(classes, classes[chosen]).tolist():
        counts = np.bincount(classes[rows])
        crowded = int(counts.argmax())
        index = max(index for index, row in enumerate(rows) if classes[row] == crowded)
        rows[index] = int(rng.choice(np.flatnonzero(classes == missing)))
    return np.array(rows)
