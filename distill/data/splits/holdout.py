"""Holding rows out of train for the splits that a data set doesn't have."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from distill.data.config import DataConfig
from distill.data.splits.findings import Findings
from distill.errors import InputError

_Part = TypeVar("_Part")


def hold_out_missing(
    parts: dict[str, _Part],
    findings: Findings,
    config: DataConfig,
    cut: Callable[[_Part, float], tuple[_Part, _Part, str]],
) -> None:
    """Holds rows out of train for the missing splits.

    Args:
        parts: The splits by name; missing ones are added, and train is replaced.
        findings: Receives the source of each split.
        config: Contains the fractions to hold out.
        cut: Called with train and a fraction; returns the part that stays in train, the held-out part, and a
            description of it.
    """
    for split, fraction in (("test", config.test_fraction), ("validation", config.validation_fraction)):
        if split in parts:
            findings.counts.setdefault(f"{split}_from", "the data set")
            continue
        parts["train"], parts[split], description = cut(parts["train"], fraction)
        findings.counts[f"{split}_from"] = description
        findings.remarks.append(f"{split}: {description}")


def split_at_random(rows: list[_Part], fraction: float, seed: int, what: str) -> tuple[list[_Part], list[_Part]]:
    """Splits rows at random, without strata, into (kept, held), each in the original order; see `draw_held_out`."""
    held_out = draw_held_out(len(rows), fraction, seed, what)
    return [row for i, row in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]


def draw_held_out(count: int, fraction: float, seed: int, what: str) -> set[int]:
    """Draws the indices of the held-out items among `count`, at least one.

    Raises:
        InputError: No item would be left.
    """
    size = max(1, round(count * fraction))
    if size >= count and count > 1:
        raise InputError(
            f"data: expected a held-out share that leaves some of the {count} {what} in train, found {fraction:g}"
        )
    if size >= count:
        raise InputError(
            f"data: expected at least two {what} to hold one out, found {count}: there would be nothing to evaluate on"
        )
    return set(np.random.default_rng(seed).permutation(count)[:size].tolist())


def hold_out(labels: Sequence[str], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Splits row indices into (kept, held), with the same held share in every class; a class of one row is kept.

    Raises:
        InputError: No class has a second row.
    """
    rng = np.random.default_rng(seed)
    held_out: list[int] = []
    by_label: dict[str, list[int]] = {}
    for row, name in enumerate(labels):
        by_label.setdefault(name, []).append(row)
    for name in sorted(by_label):
        rows = by_label[name]
        count = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
        held_out += [rows[i] for i in rng.permutation(len(rows))[:count]]
    chosen = set(held_out)
    if not held_out:
        raise InputError(
            f"data: expected a class of at least two rows to hold some out, found {len(labels)} rows left in train, "
            "each of its own class: there would be nothing to evaluate on"
        )
    return [row for row in range(len(labels)) if row not in chosen], sorted(held_out)


def check_strata(strata: Sequence[str], missing: Sequence[str]) -> None:
    """Checks that some stratum has enough rows to hold one out for each missing split and leave one in train.

    Raises:
        InputError: No stratum is that large.
    """
    sizes = Counter(strata)
    largest, needed = max(sizes.values()), 1 + len(missing)
    if largest >= needed:
        return
    splits, found = " and ".join(missing), f"{len(strata):,} rows"
    if len(sizes) > 1:
        found = f"{len(sizes):,} classes in {len(strata):,} rows, the largest of {largest}"
    raise InputError(
        f"data: there is no file for {splits}; to hold a row out for each and leave one in train, expected at least "
        f"{needed} rows{' of a class' if len(sizes) > 1 else ''}, found {found}: nothing to evaluate on; "
        f"add rows, or a {' and a '.join(missing)} file"
    )
