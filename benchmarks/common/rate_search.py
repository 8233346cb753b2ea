"""The search of every comparison of trainings: the same number of values for each, judged by the first seed."""

from collections.abc import Callable, Sequence
from typing import TypeVar

_Result = TypeVar("_Result")


def train_at_best(
    train: Callable[[float, int], _Result],
    values: Sequence[float],
    seeds: Sequence[int],
    score: Callable[[_Result], float],
) -> list[_Result]:
    """Returns the results of all seeds, in order, at the value at which the first seed's score was highest.

    Args:
        train: Trains with a value and a seed.
        values: Learning rates, or factors of one.
        seeds: Seeds of the trainings.
        score: The validation score of a result.
    """
    first, *others = seeds
    tried = [(value, train(value, first)) for value in values]
    best, result = max(tried, key=lambda each: score(each[1]))
    return [result, *(train(best, seed) for seed in others)]
