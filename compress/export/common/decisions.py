"""Predictions derived from logits, by kind of model: a class, several labels, a number, a span, a vector."""

from typing import Any, Literal

import numpy as np

DecisionKind = Literal["class", "labels", "number", "span", "vector"]
_NUMBER = 0.01  # share of the expected numbers' range: numbers at most this far apart agree
COSINE = 0.999  # smallest cosine similarity of vectors that agree


def find_decision_kind(model: Any) -> DecisionKind:
    """Returns the kind of a model's predictions, determined by its class and config."""
    name, config = type(model).__name__, model.config
    if name.endswith("QuestionAnswering"):
        return "span"
    if name.endswith("SentenceModel") or getattr(config, "sentence", None) is not None:
        return "vector"
    if getattr(config, "problem_type", None) == "multi_label_classification":
        return "labels"
    one = name.endswith("SequenceClassification") and config.num_labels == 1
    return "number" if one or getattr(config, "problem_type", None) == "regression" else "class"


def predictions_agree(kind: DecisionKind, found: np.ndarray, expected: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns which predictions agree.

    Args:
        kind: Kind of the model.
        found, expected: Logits [rows, classes]; a row is a text, or a token of a text.
        lengths: Tokens of each text [texts], which split the rows into texts for spans; ignored for other kinds.

    Returns:
        [predictions] bool: one per row; for spans the start and the end of each text.
    """
    result: np.ndarray
    if kind == "labels":
        result = ((found > 0) == (expected > 0)).all(-1)
        return result
    if kind == "number":
        result = np.abs(found - expected).max(-1) <= _NUMBER * max(float(np.ptp(expected)), 1e-9)
        return result
    if kind == "vector":
        norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
        result = (found * expected).sum(-1) >= COSINE * np.maximum(norms, 1e-12)
        return result
    if kind == "span":
        ends = np.cumsum(lengths)[:-1]
        pairs = zip(np.split(found, ends), np.split(expected, ends), strict=True)
        return np.concatenate([logits.argmax(0) == reference.argmax(0) for logits, reference in pairs])
    result = found.argmax(-1) == expected.argmax(-1)
    return result
