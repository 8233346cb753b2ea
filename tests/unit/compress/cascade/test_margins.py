"""Why confidence is the margin between the two best classes: simulations of a weak and a strong classifier."""

import numpy as np
import pytest

from compress.cascade.reader import compute_probabilities, measure_margins
from compress.cascade.temperature import fit_temperature

SHARES = (0.3, 0.5, 0.7, 0.9)  # of the texts, which the weak classifier answers
CALIBRATION = 1000  # texts that the temperature is fitted on


def simulate_confusion(classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns logits of both classifiers and the classes; each class has one that it is easily taken for."""
    rng = np.random.default_rng(seed)
    truth, taken_for = rng.integers(0, classes, 4000), rng.integers(0, classes, classes)
    hardness = rng.gamma(2, 1, len(truth))[:, None]
    clear = 6 * np.eye(classes)[truth] + np.eye(classes)[taken_for[truth]] * rng.uniform(0, 5, len(truth))[:, None]
    weak = 0.7 * clear + rng.normal(0, 1.1, clear.shape) * hardness
    return weak, clear + rng.normal(0, 0.6, clear.shape) * hardness, truth


def simulate_mixture(classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns logits of nearest-centroid classifiers, of which the weak one sees half the features, and the classes."""
    rng = np.random.default_rng(seed)
    size = 2 * max(4, classes // 5)
    centres, truth = rng.normal(0, 1, (classes, size)), rng.integers(0, classes, 4000)
    points = centres[truth] + rng.normal(0, 1, (len(truth), size)) * rng.uniform(0.3, 1.4, len(truth))[:, None]
    strong, weak = (
        points[:, :width] @ centres[:, :width].T - (centres[:, :width] ** 2).sum(1) / 2 for width in (size, size // 2)
    )
    return weak, strong, truth


def mean_accuracy(confidence: np.ndarray, weak: np.ndarray, strong: np.ndarray, truth: np.ndarray) -> float:
    """Returns the mean accuracy over SHARES of texts that the weak classifier answers, the surest first."""
    hits = [each.argmax(-1) == truth for each in (weak, strong)]
    masks = [confidence >= np.quantile(confidence, 1 - share) for share in SHARES]
    return float(np.mean([np.where(accepted, *hits).mean() for accepted in masks]))


@pytest.mark.parametrize("classes", [3, 20, 77])
@pytest.mark.parametrize("simulate", [simulate_confusion, simulate_mixture])
def test_margins_leave_the_right_texts_to_the_next_member(simulate, classes):
    gains, losses = [], []
    for seed in range(5):
        weak, strong, truth = simulate(classes, seed)
        temperature = fit_temperature(weak[:CALIBRATION], truth[:CALIBRATION])
        weak, strong, truth = weak[CALIBRATION:], strong[CALIBRATION:], truth[CALIBRATION:]
        probabilities = compute_probabilities(weak, temperature)
        entropy = -(probabilities * np.log(np.maximum(probabilities, 1e-12))).sum(-1)
        by_margin, by_largest, by_entropy = (
            mean_accuracy(each, weak, strong, truth)
            for each in (measure_margins(probabilities), probabilities.max(-1), -entropy)
        )
        gains.append(by_margin - by_largest)
        losses.append(by_entropy - by_largest)
    assert -0.0005 < np.mean(gains) < 0.04
    assert np.mean(losses) < 0
