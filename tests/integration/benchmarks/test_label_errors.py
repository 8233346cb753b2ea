"""Wrong labels that a benchmark puts in, and how it judges what is found."""

import numpy as np
import pytest
import torch

from benchmarks.data.label_errors import find_doubted, find_nearest_classes, mislabel_rows

SUBJECTS = {"card": "bank card", "cash": "bank cash", "loan": "home loan", "visa": "travel visa", "pin": "bank pin"}
ROWS = [(f"my {words} number {row}", name) for name, words in SUBJECTS.items() for row in range(20)]


def test_similar_classes_share_words():
    nearest = find_nearest_classes(ROWS)
    assert set(nearest["card"][:2]) == {"cash", "pin"}
    assert all(name not in others and len(others) == 3 for name, others in nearest.items())


@pytest.mark.parametrize("noise", ["any", "similar"])
def test_a_tenth_of_the_labels_is_replaced(noise):
    rows, nearest = mislabel_rows(ROWS, noise), find_nearest_classes(ROWS)
    wrong = [row for row in rows if row.is_mislabelled]
    assert len(wrong) == 10
    for row in rows:
        right = ROWS[row.source][1]
        assert row.is_mislabelled == (row.label != right)
        assert row.text == ROWS[row.source][0]
        assert noise == "any" or not row.is_mislabelled or row.label in nearest[right]


def test_every_method_finds_labels_that_are_plainly_wrong():
    rng = np.random.default_rng(0)
    right = rng.integers(0, 5, 500)
    logits = torch.from_numpy(rng.normal(0, 1, (500, 5)))
    logits[np.arange(500), right] += 6
    wrong = right.copy()
    wrong[:40] = (wrong[:40] + 1) % 5
    for name, doubted in find_doubted(wrong, logits).items():
        assert doubted[:40].mean() > 0.8, name
        assert doubted[40:].mean() < 0.05, name
