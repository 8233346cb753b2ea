"""Labels that a teacher contradicts, judged by its logits for rows that it wasn't trained on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.errors import InputError

_FITTED_ROWS = 50_000  # at most about twice as many are used to fit two numbers
# Logarithm of the temperature, and a tenth of the labels wrong: the likelihood can have several maxima.
_STARTS = ((-1.4, -1.4), (0.0, -1.4), (1.4, -1.4))
_PRIOR_ROWS = 20  # that are taken to be right, which decides where the network knows nothing
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
    own look like those of the labels. Therefore the temperature of the logits and the share of wrong labels are fitted
    together, as the maximum of the likelihood of the given labels: a label is right and drawn from the tempered
    probabilities, or wrong and any other one. Confusable classes keep probability at that temperature, so a label
    that the network merely finds the second best isn't taken for a wrong one.

    Source: the mixture is that of symmetric label noise (Natarajan et al. 2013, "Learning with noisy labels"), with
    temperature scaling (Guo et al. 2017, arXiv 1706.04599); to fit both from out-of-fold logits is our choice.

    Args:
        labels: A class id per row, or a list with a 1 or 0 for each of several labels.
        logits: Of each class, by a model that wasn't trained on the row, [rows, classes].
    """
    given, scores = torch.tensor(labels), logits.double()
    some = slice(None, None, max(1, len(labels) // _FITTED_ROWS))
    fits = [_fit(given[some], scores[some], start) for start in _STARTS]
    parameters, _ = min(fits, key=lambda fit: fit[1])
    parts = zip(given.split(_FITTED_ROWS), scores.split(_FITTED_ROWS), strict=True)
    pairs = [_split_likelihood(*part, parameters) for part in parts]
    found = torch.cat([wrong / (right + wrong).clamp_min(_TINY) for right, wrong in pairs])
    return (found.amax(1) if found.ndim == 2 else found).numpy()


def _fit(given: Tensor, logits: Tensor, start: tuple[float, float]) -> tuple[Tensor, float]:
    """Returns the parameters of the mixture that are the best near a start, and their loss."""
    parameters = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([parameters], max_iter=100, line_search_fn="strong_wolfe")

    def compute_loss() -> Tensor:
        search.zero_grad()
        right, wrong = _split_likelihood(given, logits, parameters)
        prior = _PRIOR_ROWS * (1 - _wrong_share(parameters)).log()
        loss = -((right + wrong).clamp_min(_TINY).log().sum() + prior) / len(right)
        loss.backward()
        return loss

    search.step(compute_loss)
    return parameters.detach(), float(compute_loss())


def _split_likelihood(given: Tensor, logits: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the likelihood of each label as a right and as a wrong one; [rows], of several labels [rows, classes]."""
    share, scaled = _wrong_share(parameters), logits / parameters[0].exp()
    if given.ndim == 2:
        right, others = torch.where(given > 0, scaled, -scaled).sigmoid(), 1
    else:
        right, others = scaled.softmax(-1).gather(1, given[:, None])[:, 0], logits.shape[1] - 1
    return (1 - share) * right, share / others * (1 - right)


def _wrong_share(parameters: Tensor) -> Tensor:
    return 0.5 * parameters[1].sigmoid()  # fewer than half are wrong


def relabel(label: Any, probabilities: np.ndarray) -> Any:
    """Returns the most probable class, or of several labels those that are more probable than not."""
    if isinstance(label, list):
        return [int(each > 0.5) for each in probabilities.tolist()]
    return int(probabilities.argmax())
