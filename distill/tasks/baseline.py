"""What a task is answered with without looking at a text: the score that a model has to beat."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Baseline:
    """One answer for every row.

    Args:
        name: What reports call it.
        answer: What the answer is, for a sentence.
        logits: A model's output that gives this answer, of so many rows of so many tokens: float32.
    """

    name: str
    answer: str
    logits: Callable[[int, int], np.ndarray]


def same_for_rows(row: np.ndarray) -> Callable[[int, int], np.ndarray]:
    """[rows, classes], each of them this one [classes]."""
    return lambda rows, length: np.tile(row.astype(np.float32), (rows, 1))


def same_for_tokens(token: np.ndarray) -> Callable[[int, int], np.ndarray]:
    """[rows, length, classes], each of them this one [classes]."""
    return lambda rows, length: np.tile(token.astype(np.float32), (rows, length, 1))


def no_answers(rows: int, length: int) -> np.ndarray:
    """[rows, length, 2]: starts and ends at the first token, which says that there is no answer."""
    found = np.zeros((rows, length, 2), np.float32)
    found[:, 0] = 1
    return found
