"""The choice of members and thresholds, compared with all choices on small data."""

from itertools import combinations, product

import numpy as np
import pytest

from compress.cascade.reader import compute_probabilities, measure_margins
from compress.cascade.temperature import fit_temperature
from compress.cascade.thresholds import CascadeTarget, ChosenCascade, choose_cascade
from compress.errors import CompressError

MILLISECONDS = {"small": 0.1, "middle": 0.7, "large": 2.0}
MARGIN_MS = {"small": 0.05, "middle": 0.02, "large": 0.3}


def draw_probabilities(rows: int, seed: int, *, multi_label: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns probabilities of three students, each better than the one before, and the right answers."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 2, (rows, 3)) if multi_label else rng.integers(0, 4, rows)
    centre = 2.0 * truth - 1 if multi_label else 2.0 * np.eye(4)[truth]
    probabilities = {}
    for name, noise in (("large", 0.5), ("small", 2.0), ("middle", 1.2)):
        probabilities[name] = compute_probabilities(centre + rng.normal(0, noise, centre.shape), 1.0, multi_label)
    return probabilities, truth


def score(predicted: np.ndarray, truth: np.ndarray) -> float:
    if truth.ndim == 1:
        return float((predicted.argmax(-1) == truth).mean())
    positive = predicted > 0.5
    return 2 * (positive & (truth > 0)).sum() / max(1, positive.sum() + truth.sum())


def list_all_cascades(probabilities: dict[str, np.ndarray], truth: np.ndarray) -> list[tuple[float, float]]:
    """Returns (score, mean milliseconds) of all chains with a threshold at each margin of each member."""
    margins = {name: measure_margins(each, truth.ndim == 2) for name, each in probabilities.items()}
    results = []
    for length in (1, 2, 3):
        for chain in combinations(MILLISECONDS, length):
            for thresholds in product(*(np.unique(margins[name]) for name in chain[:-1])):
                combined, cost = probabilities[chain[-1]].copy(), np.zeros(len(truth))
                waiting = np.ones(len(truth), bool)
                for name, threshold in zip(chain, (*thresholds, 0.0), strict=True):
                    cost += waiting * (MILLISECONDS[name] + MARGIN_MS[name] * (name != chain[-1]))
                    accepted = waiting & (margins[name] >= threshold)
                    combined[accepted] = probabilities[name][accepted]
                    waiting &= ~accepted
                results.append((score(combined, truth), float(cost.mean())))
    return results


def apply_cascade(
    chosen: ChosenCascade, probabilities: dict[str, np.ndarray], truth: np.ndarray
) -> tuple[float, float]:
    """Returns the score and the mean milliseconds of a chosen cascade, row by row."""
    combined, total = np.zeros_like(probabilities["large"]), 0.0
    for row in range(len(truth)):
        for name, threshold in zip(chosen.order, chosen.thresholds, strict=True):
            total += MILLISECONDS[name] + MARGIN_MS[name] * (name != chosen.order[-1])
            combined[row] = probabilities[name][row]
            if measure_margins(combined[row][None], truth.ndim == 2)[0] >= threshold:
                break
    return score(combined, truth), total / len(truth)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_no_cascade_beats_the_chosen_one(seed, multi_label):
    probabilities, truth = draw_probabilities(14, seed, multi_label=multi_label)
    cascades = list_all_cascades(probabilities, truth)
    for share in (0.8, 0.95, 1.0):
        least = share * max(each[0] for each in cascades)
        chosen = choose_cascade(probabilities, truth, MILLISECONDS, CascadeTarget(score=least), margin_ms=MARGIN_MS)
        assert chosen.score >= least - 1e-9
        assert chosen.milliseconds == pytest.approx(min(ms for achieved, ms in cascades if achieved >= least - 1e-9))
        assert apply_cascade(chosen, probabilities, truth) == pytest.approx((chosen.score, chosen.milliseconds))
    for limit in (0.1, 0.4, 1.0, 3.0):
        chosen = choose_cascade(
            probabilities, truth, MILLISECONDS, CascadeTarget(milliseconds=limit), margin_ms=MARGIN_MS
        )
        assert chosen.milliseconds <= limit * (1 + 1e-6)
        assert chosen.score == pytest.approx(max(achieved for achieved, ms in cascades if ms <= limit + 1e-9))


def test_many_rows_are_divided_as_well_as_by_a_fine_grid():
    probabilities, truth = draw_probabilities(3000, 0, multi_label=False)
    chosen = choose_cascade(probabilities, truth, MILLISECONDS, CascadeTarget(milliseconds=1.0), margin_ms=MARGIN_MS)
    assert chosen.milliseconds <= 1.0
    assert sum(chosen.shares) == pytest.approx(1)
    assert apply_cascade(chosen, probabilities, truth) == pytest.approx((chosen.score, chosen.milliseconds))
    small = measure_margins(probabilities["small"])
    for threshold in np.quantile(small, np.linspace(0, 1, 200)):  # pairs within the limit
        accepted = small >= threshold
        if 0.1 + MARGIN_MS["small"] + 2.0 * (~accepted).mean() <= 1.0:
            mixed = np.where(accepted[:, None], probabilities["small"], probabilities["large"])
            assert chosen.score >= score(mixed, truth) - 0.005


def test_a_single_student_is_chosen_where_another_member_gains_nothing():
    probabilities, truth = draw_probabilities(50, 1, multi_label=False)
    perfect = {**probabilities, "small": np.eye(4)[truth]}
    chosen = choose_cascade(perfect, truth, MILLISECONDS, CascadeTarget(score=1.0))
    assert (chosen.order, chosen.thresholds, chosen.shares) == (("small",), (0.0,), (1.0,))


def test_an_unreachable_target_is_rejected_with_the_best_that_is_reached():
    truth = np.array([0, 1, 1])
    wrong = {"small": np.eye(2)[1 - truth], "large": np.eye(2)[[0, 0, 1]]}
    with pytest.raises(CompressError, match=r"reach a score of 0\.9000 .* found 0\.6667"):
        choose_cascade(wrong, truth, MILLISECONDS, CascadeTarget(score=0.9))
    with pytest.raises(CompressError, match=r"at most 0\.05 ms, found 0\.1 ms"):
        choose_cascade(wrong, truth, MILLISECONDS, CascadeTarget(milliseconds=0.05))
    with pytest.raises(CompressError, match="found both"):
        CascadeTarget(score=0.9, milliseconds=1.0)


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_fitted_temperature_has_the_smallest_cross_entropy(multi_label):
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, (400, 3)) if multi_label else rng.integers(0, 4, 400)
    centre = truth - 0.5 if multi_label else np.eye(4)[truth]
    logits = 5 * (centre + rng.normal(0, 0.8, centre.shape))

    def cross_entropy(temperature: float) -> float:
        probabilities = compute_probabilities(logits, temperature, multi_label)
        right = (
            np.where(truth == 1, probabilities, 1 - probabilities)
            if multi_label
            else probabilities[np.arange(400), truth]
        )
        return -np.log(right).mean()

    fitted = fit_temperature(logits, truth)
    assert cross_entropy(fitted) <= min(map(cross_entropy, np.geomspace(0.5, 10, 300))) + 1e-12
    assert fitted == pytest.approx(fit_temperature(logits * 2, truth) / 2)


def test_the_temperature_of_an_unerring_student_is_bounded():
    assert fit_temperature(np.eye(3)[[0, 1, 2]], np.array([0, 1, 2])) == pytest.approx(0.05)


def test_a_margin_is_the_lead_of_the_best_class_or_that_of_the_least_sure_label():
    assert measure_margins(np.array([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]])) == pytest.approx([0.2, 0.0])
    assert measure_margins(np.array([[0.9, 0.4], [0.5, 1.0]]), multi_label=True) == pytest.approx([0.2, 0.0])
