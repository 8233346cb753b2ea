"""Tests of doubtful labels: folds, what is found, and the better label."""

import numpy as np
import pytest
import torch

from distill.data.clean.label_errors import draw_folds, estimate_label_errors, relabel
from distill.errors import InputError


def test_folds_have_the_same_share_of_every_class():
    labels = [number % 3 for number in range(90)]
    folds = draw_folds(labels, 3, 0)
    counts = np.array([[sum((folds == fold) & (np.array(labels) == each)) for each in range(3)] for fold in range(3)])
    assert (counts == 10).all()
    assert draw_folds(labels, 3, 0).tolist() == folds.tolist()
    assert draw_folds(labels, 3, 1).tolist() != folds.tolist()


def test_a_class_with_fewer_rows_than_folds_is_rejected():
    with pytest.raises(InputError, match=r"step labels: expected at least 3 rows of each class, one a fold, found 2"):
        draw_folds([0, 0, 0, 1, 1], 3, 0)
    assert sorted(draw_folds([[1, 0], [0, 1], [1, 1]], 3, 0).tolist()) == [0, 1, 2]


def make_confused_network(rows: int, classes: int, share: float, scale: float) -> tuple[np.ndarray, ...]:
    """Returns (right labels, given labels, logits) of a network that confuses neighboring classes, `scale` times too
    sure."""
    rng = np.random.default_rng(1)
    right = rng.integers(0, classes, rows)
    logits = np.full((rows, classes), -4.0)
    logits[np.arange(rows), right] = rng.normal(2.0, 1.0, rows)
    logits[np.arange(rows), (right + 1) % classes] = rng.normal(0.5, 1.0, rows)
    wrong = rng.random(rows) < share
    labels = np.where(wrong, (right + rng.integers(1, classes, rows)) % classes, right)
    return right, labels, scale * logits


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 5.0])
def test_a_network_that_is_too_sure_of_its_own_mistakes_doubts_the_same_labels(scale):
    right, labels, logits = make_confused_network(4000, 20, 0.1, scale)
    doubts = estimate_label_errors(labels.tolist(), torch.from_numpy(logits))
    wrong, doubted = labels != right, doubts > 0.5
    assert (logits.argmax(1) != right).mean() > 0.1
    assert (wrong & doubted).sum() / wrong.sum() > 0.85
    assert (wrong & doubted).sum() / doubted.sum() > 0.85
    assert doubts.sum() == pytest.approx(wrong.sum(), rel=0.15)


def make_noisy_labels(noise: str, rows: int = 3000, classes: int = 30) -> tuple[np.ndarray, ...]:
    """Returns (right labels, given labels, logits) of a network that knows how unsure it is but for its temperature.

    A tenth of the labels are wrong: any other class, or the next one.
    """
    rng = np.random.default_rng(1)
    likely = rng.integers(0, classes, rows)
    logits = rng.normal(0, 1, (rows, classes))
    logits[np.arange(rows), likely] += rng.normal(6, 1.5, rows)
    logits[np.arange(rows), likely ^ 1] += rng.normal(3, 1.5, rows)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    right = (probabilities.cumsum(1) > rng.random((rows, 1))).argmax(1)
    other = (right + (1 if noise == "next" else rng.integers(1, classes, rows))) % classes
    return right, np.where(rng.random(rows) < 0.1, other, right), 1.6 * logits


@pytest.mark.parametrize(
    ("noise", "least_precision", "least_recall"),
    [pytest.param("any", 0.75, 0.55, marks=pytest.mark.slow), ("next", 0.55, 0.75)],
)
def test_which_classes_are_confused_is_learned_from_the_labels(noise, least_precision, least_recall):
    right, labels, logits = make_noisy_labels(noise)
    wrong, doubted = labels != right, estimate_label_errors(labels.tolist(), torch.from_numpy(logits)) > 0.5
    assert wrong[doubted].mean() > least_precision
    assert doubted[wrong].mean() > least_recall


def test_nothing_is_doubted_where_the_network_knows_nothing():
    labels = np.random.default_rng(0).integers(0, 4, 1000)
    logits = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    assert not (estimate_label_errors(labels.tolist(), logits) > 0.5).any()


def test_right_labels_are_not_doubted():
    right, _, logits = make_confused_network(4000, 20, 0.0, 1.0)
    assert (estimate_label_errors(right.tolist(), torch.from_numpy(logits)) > 0.5).mean() < 0.005


def test_sets_of_labels_are_judged_label_by_label():
    rng = np.random.default_rng(0)
    right = (rng.random((300, 3)) < 0.4).astype(int)
    logits = np.where(right == 1, 1, -1) * rng.normal(4.0, 1.0, right.shape)
    labels = right.copy()
    labels[:10, 0] ^= 1
    doubts = estimate_label_errors(labels.tolist(), torch.from_numpy(logits))
    assert doubts.shape == (300,)
    assert set(np.flatnonzero(doubts > 0.5)) == set(range(10))
    probabilities = torch.from_numpy(logits).sigmoid().numpy()
    assert relabel(labels[0].tolist(), probabilities[0]) == right[0].tolist()


def test_the_better_label_is_the_most_probable_one():
    assert relabel(0, np.array([0.1, 0.7, 0.2])) == 1
