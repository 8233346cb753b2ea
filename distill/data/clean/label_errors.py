"""Labels that a teacher contradicts: confident learning on probabilities for rows that it wasn't trained on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distill.errors import InputError


def draw_folds(labels: Sequence[Any], folds: int, seed: int) -> np.ndarray:
    """Returns the fold of each row, with about the same share of every label in each; int64 [rows].

    Args:
        labels: A class id per row, or a list with a 1 or 0 for each of several labels.
        folds: Number of folds.
        seed: Of the order in which rows are dealt out.

    Raises:
        InputError: A label has fewer rows than there are folds, so that a fold would train without it.
    """
    groups: dict[Any, list[int]] = {}
    for row in np.random.default_rng(seed).permutation(len(labels)).tolist():
        label = labels[row]
        groups.setdefault(tuple(label) if isinstance(label, list) else label, []).append(row)
    assigned = np.empty(len(labels), np.int64)
    dealt = 0
    for label in sorted(groups):
        if not isinstance(label, tuple) and len(groups[label]) < folds:
            raise InputError(
                f"data.clean: step labels: expected at least {folds} rows of each class, one a fold, found "
                f"{len(groups[label])} of one: the teacher would be trained without it; set data.clean.folds"
            )
        for row in groups[label]:
            assigned[row] = dealt % folds
            dealt += 1
    return assigned


def find_label_errors(labels: Sequence[Any], probabilities: np.ndarray) -> np.ndarray:
    """Returns which labels are probably wrong, bool [rows].

    Source: Northcutt et al. 2021, "Confident learning" (arXiv 1911.00068), by cleanlab: of each pair of a given and a
    more probable class as many rows as their estimated joint distribution contains, the least probable first.

    Args:
        labels: A class id per row, or a list with a 1 or 0 for each of several labels.
        probabilities: Of each class, by a model that wasn't trained on the row; float [rows, classes].

    Raises:
        InputError: cleanlab isn't installed.
    """
    try:
        from cleanlab.filter import find_label_issues
    except ImportError as error:
        raise InputError(
            "data.clean: step labels: expected the package cleanlab, found none: wrong labels can't be found; install "
            "it with pip install 'stillroom[clean]'"
        ) from error
    if labels and isinstance(labels[0], list):
        given = [np.flatnonzero(row).tolist() for row in labels]
        found = find_label_issues(given, probabilities, multi_label=True, n_jobs=1)
    else:
        found = find_label_issues(np.asarray(labels), probabilities, n_jobs=1)
    return np.asarray(found, bool)


def relabel(label: Any, probabilities: np.ndarray) -> Any:
    """Returns the most probable class, or of several labels those that are more probable than not."""
    if isinstance(label, list):
        return [int(each > 0.5) for each in probabilities.tolist()]
    return int(probabilities.argmax())
