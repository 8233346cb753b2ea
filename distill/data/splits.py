"""Turns raw tables into labelled splits: the same text, the same labels, nothing of test in train."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from distill.data.columns import find_columns
from distill.data.config import DataConfig
from distill.data.source import read_splits, read_table
from distill.errors import InputError


@dataclass(frozen=True)
class Examples:
    """Texts with class numbers; `labels` is empty for unlabelled text."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Splits:
    """The data of a run. `notes` counts what was dropped, cut off or found twice."""

    labels: tuple[str, ...]
    train: Examples
    validation: Examples
    test: Examples
    unlabelled: Examples
    notes: dict[str, int | str]


@dataclass(frozen=True)
class Named:
    """Rows of one split with labels still as the file spells them."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[str]
    dropped: int

    def take(self, rows: Sequence[int]) -> "Named":
        pairs = [self.pairs[i] for i in rows] if self.pairs is not None else None
        return Named([self.texts[i] for i in rows], pairs, [self.labels[i] for i in rows], self.dropped)


def load_splits(config: DataConfig, seed: int = 0) -> Splits:
    """Reads, checks and splits the data set of `config`.

    Args:
        config: What to read.
        seed: Seed of the held-out rows, where the data set has no split of its own.

    Raises:
        InputError: What `read_splits` and `find_columns` raise; fewer than two classes in train; a row without a label;
            a label in validation or test that train lacks; a pair column in some splits only.
    """
    if not config.path:
        raise InputError("data: no path given; name a folder, a file or a hub data set with --data")
    named = {split: clean(table, config, split) for split, table in read_splits(config.path, config.subset).items()}
    notes: dict[str, int | str] = {"dropped_empty": sum(part.dropped for part in named.values())}
    for split, fraction in (("test", config.test_fraction), ("validation", config.validation_fraction)):
        notes[f"{split}_from"] = "the data set"
        if split not in named:
            kept, held = hold_out(named["train"].labels, fraction, seed)
            named[split], named["train"] = named["train"].take(held), named["train"].take(kept)
            notes[f"{split}_from"] = f"{len(held)} rows held out of train, stratified, seed {seed}"
    labels = label_names(named)
    number = {name: i for i, name in enumerate(labels)}
    parts = {
        split: Examples(part.texts, part.pairs, [number[name] for name in part.labels]) for split, part in named.items()
    }
    unlabelled = load_unlabelled(config)
    check_pairs(parts | ({"unlabelled": unlabelled} if len(unlabelled) else {}))
    notes["test_texts_also_in_train"] = overlap(parts["test"], parts["train"])
    return Splits(labels, parts["train"], parts["validation"], parts["test"], unlabelled, notes)


def clean(table: pa.Table, config: DataConfig, split: str) -> Named:
    """Strips the texts and drops the rows that hold none."""
    where = f"data {config.path!r}, {split}"
    columns = find_columns(table, config, where)
    texts = strings(table, columns.text)
    pairs = strings(table, columns.text_pair) if columns.text_pair else None
    assert columns.label is not None
    labels = strings(table, columns.label)
    kept = [i for i, text in enumerate(texts) if text and (pairs is None or pairs[i])]
    bare = [i + 1 for i in kept if not labels[i]]
    if bare:
        raise InputError(
            f"{where}: {len(bare)} rows have no label in column {columns.label!r}, the first is row {bare[0]}; "
            "put unlabelled text in a file of its own and pass it with --data.unlabelled"
        )
    if not kept:
        raise InputError(f"{where}: column {columns.text!r} holds no text in any of {len(texts)} rows")
    return Named(texts, pairs, labels, len(texts) - len(kept)).take(kept)


def strings(table: pa.Table, column: str) -> list[str]:
    return ["" if value is None else str(value).strip() for value in table[column].to_pylist()]


def label_names(named: dict[str, Named]) -> tuple[str, ...]:
    """Train's labels in a fixed order: by number where all are numbers, else by name."""
    seen = set(named["train"].labels)
    if len(seen) < 2:
        raise InputError(
            f"data: expected at least two classes in train, found {len(seen)} ({', '.join(sorted(seen))}): "
            "every model would be right without looking"
        )
    for split, part in named.items():
        extra = Counter(name for name in part.labels if name not in seen)
        if extra:
            listed = ", ".join(f"{name!r} ({count} rows)" for name, count in extra.most_common(5))
            raise InputError(f"data: {split} has labels that train lacks: {listed}; no model could ever predict them")
    if all(re.fullmatch(r"-?\d+", name) for name in seen):
        return tuple(sorted(seen, key=lambda name: (int(name), name)))  # 7 and 007 are two labels
    return tuple(sorted(seen))


def hold_out(labels: Sequence[str], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Splits row numbers into (kept, held), the held share the same in every class; a class of one row is kept."""
    rng = np.random.default_rng(seed)
    held: list[int] = []
    by_label: dict[str, list[int]] = {}
    for row, name in enumerate(labels):
        by_label.setdefault(name, []).append(row)
    for name in sorted(by_label):
        rows = by_label[name]
        count = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
        held += [rows[i] for i in rng.permutation(len(rows))[:count]]
    chosen = set(held)
    if not held:
        raise InputError(
            f"data: expected a class of at least two rows to hold some out, found {len(labels)} rows, each of its own "
            "class: there would be nothing to measure on"
        )
    return [row for row in range(len(labels)) if row not in chosen], sorted(held)


def check_pairs(parts: dict[str, Examples]) -> None:
    with_pair = sorted(split for split, part in parts.items() if part.pairs is not None)
    if with_pair and len(with_pair) != len(parts):
        raise InputError(f"data: only {', '.join(with_pair)} has a second text: the model would see other inputs")


def overlap(test: Examples, train: Examples) -> int:
    """Counts test rows whose text stands in train too, after case and punctuation are folded."""

    def folded(part: Examples) -> list[tuple[str, ...]]:
        pairs = part.pairs or [""] * len(part)
        rows = zip(part.texts, pairs, strict=True)
        return [tuple(" ".join(re.findall(r"\w+", t.casefold())) for t in row) for row in rows]

    seen = set(folded(train))
    return sum(row in seen for row in folded(test))


def load_unlabelled(config: DataConfig) -> Examples:
    if config.unlabelled is None:
        return Examples([], None)
    table = read_table(Path(config.unlabelled).expanduser())
    columns = find_columns(table, config, f"unlabelled text {config.unlabelled!r}", labelled=False)
    texts = strings(table, columns.text)
    pairs = strings(table, columns.text_pair) if columns.text_pair else None
    kept = [i for i, text in enumerate(texts) if text and (pairs is None or pairs[i])]
    return Examples([texts[i] for i in kept], [pairs[i] for i in kept] if pairs else None)
