"""Labels that a teacher contradicts, judged by its logits for rows that it wasn't trained on."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distill.errors import InputError

_FITTED_ROWS = 20_000  # drawn for the fit where there are more
_TEMPERATURES = tuple(math.exp(each / 4) for each in range(-5, 7))  # 0.29 to 4.5
_ROUNDS = 30
_MOST = 0.5  # of the labels are wrong
_PSEUDO_COUNTS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # that smooth the transitions of each class
_RIGHT_ROWS = 20  # pseudo-count of right labels
_TINY = 1e-300


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


def estimate_label_errors(labels: Sequence[Any], logits: Tensor) -> np.ndarray:
    """Returns the probability that each row's label is wrong; float64 [rows]. Of several labels, the highest.

    Networks are surer than they should be, above all when they were trained on wrong labels, so that mistakes of their
    own look like those of the labels. Therefore the temperature of the logits, the share of wrong labels and the
    transition probabilities from right to wrong labels are fitted together to the given labels: a label is right and
    drawn from the tempered probabilities, or wrong and drawn from the transitions of the right one. How strongly these
    are smoothed towards equal probabilities is chosen by cross-validation: where labels are wrong at random, a weakly
    smoothed fit would explain the network's own mistakes as label noise.

    Source: the transitions are those of Northcutt et al. 2021, "Confident learning" (arXiv 1911.00068), as a mixture
    fitted by expectation maximization (Dawid and Skene 1979) with temperature scaling (Guo et al. 2017, arXiv
    1706.04599); to fit them together is our choice.

    Args:
        labels: A class id per row, or a list with a 1 or 0 for each of several labels.
        logits: Of each class, by a model that wasn't trained on the row, [rows, classes].
    """
    observed, scores = torch.tensor(labels), logits.double()
    shape = observed.shape
    if observed.ndim == 2:  # each label of a row is a choice between two classes
        observed, scores = observed.reshape(-1), torch.stack([torch.zeros_like(scores), scores], -1).reshape(-1, 2)
    some = torch.randperm(len(observed), generator=torch.Generator().manual_seed(0))[:_FITTED_ROWS]
    best = _fit_best(observed[some], scores[some], _choose_pseudo_count(observed[some], scores[some]))
    parts = zip(observed.split(_FITTED_ROWS), map(best.temper, scores.split(_FITTED_ROWS)), strict=True)
    doubts = torch.cat([best.judge(*part)[0] for part in parts]).reshape(shape)
    return (doubts.amax(1) if doubts.ndim == 2 else doubts).numpy()


class _Mixture(NamedTuple):
    """Right and wrong labels.

    Args:
        temperature: Of the logits.
        share: Of wrong labels.
        transitions: Probability of each other label where the label of a class (row) is wrong.
        likelihood: Mean logarithm of the likelihood of the given labels, with the prior.
    """

    temperature: float
    share: float
    transitions: Tensor
    likelihood: float = -math.inf

    def temper(self, logits: Tensor) -> Tensor:
        """Returns the probabilities of the classes at the temperature, [rows, classes]."""
        return (logits / self.temperature).softmax(-1)

    def judge(self, observed: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns for each row the probability that its label is wrong, its parts by right class, and the likelihood.

        Their shapes are [rows], [rows, classes] and [rows].
        """
        right = (1 - self.share) * probabilities.gather(1, observed[:, None])[:, 0]
        wrong = self.share * probabilities * self.transitions[:, observed].T
        total = (right + wrong.sum(1)).clamp_min(_TINY)
        return wrong.sum(1) / total, wrong / total[:, None], total


def _choose_pseudo_count(observed: Tensor, logits: Tensor) -> float:
    """Returns the pseudo-count with which the mixture of each half of the rows best predicts the other labels."""
    halves = [(observed[start::2], logits[start::2]) for start in (0, 1)]

    def measure(pseudo_count: float) -> float:
        total = 0.0
        for fitted, (labels, scores) in (halves, halves[::-1]):
            fit = _fit_best(*fitted, pseudo_count)
            total += float(fit.judge(labels, fit.temper(scores))[2].log().mean())
        return total

    return max(_PSEUDO_COUNTS, key=measure)


def _fit_best(observed: Tensor, logits: Tensor, pseudo_count: float) -> _Mixture:
    """Returns the mixture at the most likely temperature."""
    return max((_fit(observed, logits, each, pseudo_count) for each in _TEMPERATURES), key=lambda fit: fit.likelihood)


def _fit(observed: Tensor, logits: Tensor, temperature: float, pseudo_count: float) -> _Mixture:
    """Returns the mixture at a temperature."""
    rows, classes = logits.shape
    others = 1 - torch.eye(classes, dtype=torch.float64)
    mixture = _Mixture(temperature, 0.1, others / (classes - 1))
    probabilities = mixture.temper(logits)
    for _ in range(_ROUNDS):
        doubts, by_class, total = mixture.judge(observed, probabilities)
        counts = torch.zeros_like(others).index_add_(0, observed, by_class).T + pseudo_count / classes
        counts = counts * others
        share = min(_MOST, float(doubts.sum()) / (rows + _RIGHT_ROWS))
        likelihood = (float(total.log().sum()) + _RIGHT_ROWS * math.log(1 - mixture.share)) / rows
        mixture = _Mixture(temperature, share, counts / counts.sum(1, keepdim=True), likelihood)
    return mixture


def relabel(label: Any, probabilities: np.ndarray) -> Any:
    """Returns the most probable class, or of several labels those that are more probable than not."""
    if isinstance(label, list):
        return [int(each > 0.5) for each in probabilities.tolist()]
    return int(probabilities.argmax())
