"""Tests of the decisions derived from a model's outputs, by which quantized files are compared."""

import numpy as np
import pytest

from compress.export.common.decisions import find_decision_kind, predictions_agree
from distill.models.sentence_encoder import PooledModel
from support.tiny_models import build_model, saved

NONE = np.zeros(0, np.int64)


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape)


@pytest.mark.parametrize(
    ("kind", "expected", "lengths"),
    [
        ("class", rows(40, 5), NONE),
        ("labels", rows(40, 5), NONE),
        ("number", rows(40, 1), NONE),
        ("vector", rows(40, 16), NONE),
        ("span", rows(40, 2), np.full(4, 10)),
    ],
)
def test_decisions_survive_small_noise_but_not_permuted_outputs(kind, expected, lengths):
    assert predictions_agree(kind, expected + 1e-6, expected, lengths).all()
    assert predictions_agree(kind, 187 * expected[::-1] + 3, expected, lengths).mean() < 0.6


def test_one_different_label_makes_a_multi_label_decision_different():
    expected = rows(10, 100)
    found = expected.copy()
    found[3, 7] *= -1
    assert predictions_agree("labels", found, expected, NONE).tolist() == [True] * 3 + [False] + [True] * 6


def test_spans_are_compared_by_their_start_and_end_per_text():
    expected = np.zeros((7, 2))
    expected[[1, 2, 4, 6], [0, 1, 0, 1]] = 5  # two texts of 3 and 4 tokens
    assert predictions_agree("span", expected + rows(7, 2) * 1e-3, expected, np.array([3, 4])).tolist() == [True] * 4
    moved = expected.copy()
    moved[5, 1] = 9
    assert predictions_agree("span", moved, expected, np.array([3, 4])).tolist() == [True, True, True, False]


def test_the_kind_of_decision_follows_from_the_models_head(tokenizer, tmp_path):
    assert find_decision_kind(build_model("bert")) == "class"
    assert find_decision_kind(build_model("bert", num_labels=1)) == "number"
    assert find_decision_kind(build_model("bert", problem_type="multi_label_classification")) == "labels"
    assert find_decision_kind(build_model("bert", "ForQuestionAnswering")) == "span"
    assert find_decision_kind(build_model("bert", "ForTokenClassification")) == "class"
    assert (
        find_decision_kind(PooledModel.from_pretrained(saved(build_model("bert", "Model"), tokenizer, tmp_path)))
        == "vector"
    )
