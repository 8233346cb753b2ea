"""Constant predictions that ignore the text, whose score a model has to exceed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Baseline:
    """The same prediction for every row.

    Args:
        name: Name in reports.
        answer: Description of the prediction, as part of a sentence.
        logits: Maps (rows, tokens per row) to the float32 model outputs that correspond to the prediction.
    """

    name: str
    answer: str
    logits: Callable[[int, int], np.ndarray]


def repeat_for_rows(row: np.ndarray) -> Callable[[int, int], np.ndarray]:
    """Returns a function that repeats the logits `row` [classes] to [rows, classes]."""
    return lambda rows, length: np.tile(row.astype(np.float32), (rows, 1))


def repeat_for_tokens(token: np.ndarray) -> Callable[[int, int], np.ndarray]:
    """Returns a function that repeats the logits `token` [classes] to [rows, length, classes]."""
    return lambda rows, length: np.tile(token.astype(np.float32), (rows, length, 1))


def predict_no_answers(rows: int, length: int) -> np.ndarray:
    """Returns logits [rows, length, 2] with start and end at the first token, which means that there is no answer."""
    logits = np.zeros((rows, length, 2), np.float32)
    logits[:, 0] = 1
    return logits
