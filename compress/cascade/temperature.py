"""The temperature at which a classifier's probabilities fit its hits."""

import numpy as np

from compress.cascade.reader import compute_probabilities

_COLDEST, _HOTTEST = 0.05, 20.0
_HALVINGS = 60  # of the range of the logarithm, down to the last bits


def fit_temperature(logits: np.ndarray, truth: np.ndarray) -> float:
    """Returns the temperature that minimizes the cross-entropy of logits divided by it.

    The cross-entropy is convex in the inverse temperature, so the root of its derivative is found by bisection. The
    result is between 0.05 and 20; it is 0.05 if all answers are right.

    Args:
        logits: [rows, classes].
        truth: Classes, int [rows]; or which labels apply, [rows, labels], each with a probability of its own.

    Source: Guo et al. 2017, On Calibration of Modern Neural Networks, section 4.2; per label in the multi-label case.
    """
    logits = np.asarray(logits, np.float64)
    multi_label = truth.ndim == 2
    targets = truth.astype(np.float64) if multi_label else np.eye(logits.shape[1])[truth]

    def slope(temperature: float) -> float:
        """Returns the derivative of the summed cross-entropy by the inverse temperature."""
        return float(((compute_probabilities(logits, temperature, multi_label) - targets) * logits).sum())

    low, high = np.log(_COLDEST), np.log(_HOTTEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if slope(float(np.exp(middle))) > 0:  # too cold: the probabilities are too sure
            low = middle
        else:
            high = middle
    return float(np.exp((low + high) / 2))
