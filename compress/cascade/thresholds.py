"""Choice of a cascade: which classifiers run, in what order, and the margin at which each one's answer is accepted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from compress.cascade.reader import measure_margins
from compress.errors import CompressError

MOST_MEMBERS = 3  # members of a cascade; a text that reaches the last one has paid for all of them
_CUTS = 50  # thresholds of each member that are tried
_ROUNDING = 1e-9  # of scores and milliseconds that are equal but for the order of sums


@dataclass(frozen=True)
class CascadeTarget:
    """What a cascade is chosen for: the least mean latency at a score, or the best score at a mean latency.

    Args:
        score: Least score, from 0 to 1.
        milliseconds: Longest mean latency of a text; exactly one of the two is set.
    """

    score: float | None = None
    milliseconds: float | None = None

    def __post_init__(self) -> None:
        if (self.score is None) == (self.milliseconds is None):
            found = "neither" if self.score is None else "both"
            raise CompressError(f"cascade: expected a score or a latency to aim at, found {found}")


@dataclass(frozen=True)
class ChosenCascade:
    """Members in the order in which they run, and what the cascade reaches on the rows that it was chosen on.

    Args:
        order: Names of the members.
        thresholds: Least margin at which each member's answer counts; 0 for the last.
        score: Its score.
        milliseconds: Its mean latency.
        shares: Share of the rows that each member answers.
    """

    order: tuple[str, ...]
    thresholds: tuple[float, ...]
    score: float
    milliseconds: float
    shares: tuple[float, ...]


@dataclass(frozen=True)
class MemberRows:
    """What a classifier answers on the rows that a cascade is chosen on.

    Args:
        name: Its name.
        margins: How sure it is, [rows].
        hits: Hits and counts, float64 [rows, 2]; a score is the sum of hits divided by the sum of counts.
        milliseconds: Mean latency of a text.
        margin_ms: How much longer a text takes with the margin of its answer, which every member but the last computes.
    """

    name: str
    margins: np.ndarray
    hits: np.ndarray
    milliseconds: float
    margin_ms: float


@dataclass(frozen=True)
class ChainSums:
    """Sums over rows that a chain of members answers, for each combination of thresholds that is tried.

    Args:
        thresholds: [combinations, members - 1].
        hits: Hits and counts, [combinations, 2].
        milliseconds: [combinations].
    """

    thresholds: np.ndarray
    hits: np.ndarray
    milliseconds: np.ndarray


def choose_cascade(
    probabilities: Mapping[str, np.ndarray],
    truth: np.ndarray,
    milliseconds: Mapping[str, float],
    aim: CascadeTarget,
    *,
    margin_ms: Mapping[str, float] | None = None,
) -> ChosenCascade:
    """Returns the best cascade of one to three of the members.

    Cheaper members run first. Of each member but the last, up to 50 thresholds between the margins of the rows
    that reach it are tried, in all combinations. Of cascades that are equally quick (or equally good, with a latency as
    the aim), the better (or quicker) one is chosen, and of equal ones the one with fewer members.

    Args:
        probabilities: Member -> [rows, classes], or of several labels [rows, labels].
        truth: Right answers: classes, int [rows], scored by accuracy; or which labels apply, [rows, labels], scored by
            micro F1. They may be the teacher's answers.
        milliseconds: Member -> mean latency of a text.
        aim: What to reach.
        margin_ms: Member -> how much longer a text takes with the margin of its answer; None: no longer.

    Raises:
        CompressError: No combination reaches the aim; the message says what is the most that one reaches.

    Source: margins between the two best classes as in Park et al. 2015, Big/LITTLE Deep Neural Network for Ultra Low
        Power Inference, section 3; thresholds of all members together instead of one for a pair.
    """
    members = [
        MemberRows(
            name,
            measure_margins(each, truth.ndim == 2),
            count_hits(each, truth),
            milliseconds[name],
            margin_ms[name] if margin_ms else 0.0,
        )
        for name, each in sorted(probabilities.items(), key=lambda item: (milliseconds[item[0]], item[0]))
    ]
    best: tuple[tuple[float, float], ChosenCascade] | None = None
    highest, quickest = 0.0, np.inf
    for chain in list_chains(members):
        sums = sum_chain(chain, np.arange(len(truth)))
        scores = sums.hits[:, 0] / np.maximum(sums.hits[:, 1], 1)
        means = sums.milliseconds / len(truth)
        highest, quickest = max(highest, *scores, 0.0), min(quickest, *means, np.inf)
        index = find_best(scores, means, aim)
        if index is not None:
            rank = (-scores[index], means[index]) if aim.score is None else (means[index], -scores[index])
            if best is None or is_less(rank, best[0]):
                thresholds = (*map(float, sums.thresholds[index]), 0.0)
                best = rank, describe_cascade(chain, thresholds, float(scores[index]), float(means[index]))
    if best is None:
        raise CompressError(describe_unreached(aim, highest, quickest))
    return best[1]


def describe_unreached(aim: CascadeTarget, highest: float, quickest: float) -> str:
    """Returns the message for an aim that isn't reached, with the highest score and the smallest mean latency."""
    if aim.score is not None:
        return (
            f"cascade: expected members that reach a score of {aim.score:.4f} on the validation split, found "
            f"{highest:.4f} at best: request less, or add a better student"
        )
    return (
        f"cascade: expected a mean latency of at most {aim.milliseconds:g} ms, found {quickest:.3g} ms for the "
        "fastest student alone: allow more, or add a faster one"
    )


def count_hits(probabilities: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns hits and counts, float64 [rows, 2], whose sums' quotient is the accuracy, or for several labels micro F1.

    Args:
        probabilities: [rows, classes].
        truth: Classes [rows], or which labels apply [rows, labels].
    """
    if truth.ndim == 1:
        return np.stack([probabilities.argmax(-1) == truth, np.ones(len(truth))], 1).astype(np.float64)
    predicted, true = probabilities > 0.5, truth.astype(bool)
    return np.stack([2 * (predicted & true).sum(1), predicted.sum(1) + true.sum(1)], 1).astype(np.float64)


def list_chains(members: Sequence[MemberRows]) -> Iterator[tuple[MemberRows, ...]]:
    """Yields the chains of up to MOST_MEMBERS members in their order, shorter ones first."""
    for length in range(1, min(MOST_MEMBERS, len(members)) + 1):
        yield from combinations(members, length)


def sum_chain(chain: Sequence[MemberRows], rows: np.ndarray) -> ChainSums:
    """Returns what a chain reaches on these rows with each combination of thresholds; none if it can't divide them."""
    first, others = chain[0], chain[1:]
    hits, paid = first.hits[rows], len(rows) * (first.milliseconds + (first.margin_ms if others else 0))
    if not others:
        return ChainSums(np.zeros((1, 0)), hits.sum(0)[None], np.array([paid]))
    cuts = list_thresholds(first.margins[rows])
    answered = first.margins[rows] >= cuts[:, None]
    if len(others) == 1:  # all thresholds at once
        both = answered @ hits + ~answered @ others[0].hits[rows]
        return ChainSums(cuts[:, None], both, paid + (~answered).sum(1) * others[0].milliseconds)
    parts = [sum_chain(others, rows[~accepted]) for accepted in answered]
    if not parts:
        return ChainSums(np.zeros((0, len(others))), np.zeros((0, 2)), np.zeros(0))
    thresholds = [
        np.column_stack([np.full(len(part.thresholds), cut), part.thresholds])
        for cut, part in zip(cuts, parts, strict=True)
    ]
    sums = [hits[accepted].sum(0) + part.hits for accepted, part in zip(answered, parts, strict=True)]
    return ChainSums(
        np.concatenate(thresholds), np.concatenate(sums), paid + np.concatenate([part.milliseconds for part in parts])
    )


def list_thresholds(margins: np.ndarray) -> np.ndarray:
    """Returns up to 50 thresholds halfway between neighboring margins of rows [rows], evenly chosen from all."""
    ordered = np.unique(margins)
    between: np.ndarray = (ordered[1:] + ordered[:-1]) / 2
    if len(between) > _CUTS:
        between = between[np.linspace(0, len(between) - 1, _CUTS).round().astype(int)]
    return between


def find_best(scores: np.ndarray, means: np.ndarray, aim: CascadeTarget) -> int | None:
    """Returns which of the combinations, [combinations] each, reaches the aim best; None if none does."""
    if aim.score is not None:
        fits, order = scores >= aim.score - _ROUNDING, np.lexsort((-scores, means))
    else:
        fits, order = means <= (aim.milliseconds or 0) * (1 + _ROUNDING), np.lexsort((means, -scores))
    return next((int(number) for number in order if fits[number]), None)


def is_less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Returns whether one pair comes before another by more than rounding, which a longer chain must."""
    first = one[0] - other[0]
    return first < -_ROUNDING or (abs(first) <= _ROUNDING and one[1] < other[1] - _ROUNDING)


def describe_cascade(
    chain: Sequence[MemberRows], thresholds: tuple[float, ...], score: float, mean: float
) -> ChosenCascade:
    """Returns the chain with its thresholds and the share of rows that each member answers."""
    waiting, shares = np.ones(len(chain[0].margins), bool), []
    for member, threshold in zip(chain, thresholds, strict=True):
        answered = waiting & (member.margins >= threshold)
        shares.append(float(answered.mean()))
        waiting &= ~answered
    return ChosenCascade(tuple(member.name for member in chain), thresholds, score, mean, tuple(shares))
