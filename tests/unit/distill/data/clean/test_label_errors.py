"""Tests of doubtful labels: folds, what is found, and the better label."""

import numpy as np
import pytest

from distill.data.clean.label_errors import draw_folds, find_label_errors, relabel
from distill.errors import InputError


def test_folds_have_the_same_share_of_every_class():
    labels = [number % 3 for number in range(90)]
    folds = draw_folds(labels, 3, 0)
    counts = np.array([[sum((folds == fold) & (np.array(labels) == each)) for each in range(3)] for fold in range(3)])
    assert (counts == 10).all()
    assert draw_folds(labels, 3, 0).tolist() == folds.tolist()
    assert draw_folds(labels, 3, 1).tolist() != folds.tolist()


def test_a_class_with_fewer_rows_than_folds_is_refused():
    with pytest.raises(InputError, match=r"step labels: expected at least 3 rows of each class, one a fold, found 2"):
        draw_folds([0, 0, 0, 1, 1], 3, 0)
    assert sorted(draw_folds([[1, 0], [0, 1], [1, 1]], 3, 0).tolist()) == [0, 1, 2]


def test_labels_that_confident_probabilities_contradict_are_found():
    rng = np.random.default_rng(0)
    right = rng.integers(0, 4, 400)
    probabilities = np.full((400, 4), 0.05)
    probabilities[np.arange(400), right] = 0.85
    given = right.copy()
    wrong = rng.choice(400, 30, replace=False)
    given[wrong] = (given[wrong] + 1) % 4
    found = find_label_errors(given.tolist(), probabilities)
    assert set(np.flatnonzero(found)) == set(wrong)
    assert [relabel(given[row], probabilities[row]) for row in wrong] == right[wrong].tolist()


def test_sets_of_labels_are_judged_label_by_label():
    rng = np.random.default_rng(0)
    right = (rng.random((300, 3)) < 0.4).astype(int)
    right[right.sum(1) == 0, 0] = 1
    probabilities = np.where(right == 1, 0.95, 0.05)
    given = right.copy()
    given[:10, 0] ^= 1
    given[given.sum(1) == 0, 1] = 1
    found = find_label_errors(given.tolist(), probabilities)
    assert set(np.flatnonzero(found)) <= set(range(10))
    assert found[:10].sum() >= 8
    assert relabel(given[0].tolist(), probabilities[0]) == right[0].tolist()
