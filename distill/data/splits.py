"""Turns raw tables into labelled splits: the same text, the same labels, nothing of test in train."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from distill.data.cells import a_number, hot_labels, hot_width, several_labels
from distill.data.columns import LABEL, SCORE, find_columns
from distill.data.config import DataConfig
from distill.data.source import read_splits, read_table
from distill.errors import InputError


@dataclass(frozen=True)
class Examples:
    """Texts with a class number each, or 1 or 0 for each of several labels, or a number; without `labels` where nothing
    is known.
    """

    texts: list[str]
    pairs: list[str] | None = None
    labels: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def table(self) -> pa.Table:
        """As `of` reads it back."""
        columns: dict[str, Any] = {"text": pa.array(self.texts, pa.string())}
        if self.pairs is not None:
            columns["text_pair"] = pa.array(self.pairs, pa.string())
        return pa.table(columns | ({"label": pa.array(self.labels)} if self.labels else {}))

    @classmethod
    def of(cls, table: pa.Table) -> "Examples":
        columns = {name: table[name].to_pylist() for name in table.column_names}
        return cls(columns["text"], columns.get("text_pair"), columns.get("label", []))

    def joined(self, other: "Examples") -> "Examples":
        """The texts of both without labels, in order."""
        return Examples(self.texts + other.texts, None if self.pairs is None else self.pairs + (other.pairs or []))


@dataclass(frozen=True)
class Splits:
    """The data of a run, in the form of its task: `Examples`, `Tagged` or another. `notes` counts what was dropped,
    cut off or found twice.
    """

    labels: tuple[str, ...]
    train: Any
    validation: Any
    test: Any
    unlabelled: Any
    notes: dict[str, int | str]


@dataclass(frozen=True)
class Named:
    """Rows of one split with labels as the file spells them, or as a task reads them."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[Any]
    dropped: int

    def take(self, rows: Sequence[int]) -> "Named":
        pairs = [self.pairs[i] for i in rows] if self.pairs is not None else None
        return Named([self.texts[i] for i in rows], pairs, [self.labels[i] for i in rows], self.dropped)


def load_splits(config: DataConfig, seed: int = 0) -> Splits:
    """Reads, checks and splits the data set of `config`, a class a row.

    Args:
        config: What to read.
        seed: Seed of the held-out rows, where the data set has no split of its own.

    Raises:
        InputError: What `read_splits` and `find_columns` raise; fewer than two classes in train; a row without a label;
            a label in validation or test that train lacks; a pair column in some splits only.
    """
    named, notes = read_named(config)
    hold(named, notes, config, by_strata(seed, lambda part: part.labels))
    labels = label_names(named)
    number = {name: i for i, name in enumerate(labels)}
    return whole(named, notes, config, labels, lambda name: number[name])


def load_labelled(config: DataConfig, seed: int = 0) -> Splits:
    """As `load_splits`, of rows with any number of labels: a list of them in each cell, JSON of one, names between `|`
    or `;`, or a list of a 0 or 1 for each label, named by its place. Labels become 1 for each that holds and 0 for the
    others.
    """
    named, notes = read_named(config, lambda cell, where: (cell, where), bare=True)
    width = hot_width([cell for cell, _ in named["train"].labels])  # one form in all splits, whatever a small one holds
    read = partial(hot_labels, width=width) if width else several_labels
    named = {
        split: replace(part, labels=[read(cell, where) for cell, where in part.labels]) for split, part in named.items()
    }
    hold(named, notes, config, by_strata(seed, lambda part: [""] * len(part.texts)))
    seen = {name for names in named["train"].labels for name in names}
    if not seen:
        raise InputError("data: expected labels in train, found none in any row: there is nothing to learn")
    for split, part in named.items():
        check_known(split, Counter(name for names in part.labels for name in names if name not in seen))
    labels = in_order(seen)
    return whole(named, notes, config, labels, lambda names: [int(name in names) for name in labels])


def load_numbers(config: DataConfig, seed: int = 0) -> Splits:
    """As `load_splits`, of rows with a number each.

    Raises:
        InputError: A cell that is no number.
    """
    named, notes = read_named(config, a_number, labels=(*LABEL, *SCORE))
    hold(named, notes, config, by_strata(seed, lambda part: [""] * len(part.texts)))
    return whole(named, notes, config, (NUMBER,), float)


NUMBER = "number"  # name of the one output of a model that gives a number


def read_named(
    config: DataConfig,
    parse: Callable[[Any, str], Any] | None = None,
    *,
    bare: bool = False,
    labels: tuple[str, ...] = LABEL,
) -> tuple[dict[str, Named], dict[str, int | str]]:
    if not config.path:
        raise InputError("data: no path given; name a folder, a file or a hub data set with --data")
    named = {
        split: clean(table, config, split, parse, bare=bare, labels=labels)
        for split, table in read_splits(config.path, config.subset).items()
    }
    return named, {"dropped_empty": sum(part.dropped for part in named.values())}


Part = TypeVar("Part")


def hold(
    parts: dict[str, Part],
    notes: dict[str, int | str],
    config: DataConfig,
    cut: Callable[[Part, float], tuple[Part, Part, str]],
) -> None:
    """Holds rows out of train for the splits that aren't there: `cut(train, fraction)` gives what is kept, what is held
    out, and words for that.
    """
    for split, fraction in (("test", config.test_fraction), ("validation", config.validation_fraction)):
        notes[f"{split}_from"] = "the data set"
        if split not in parts:
            parts["train"], parts[split], notes[f"{split}_from"] = cut(parts["train"], fraction)


def by_strata(seed: int, strata: Callable[[Named], list[str]]) -> Callable[[Named, float], tuple[Named, Named, str]]:
    """A cut that holds out the same share of each of `strata`."""

    def cut(train: Named, fraction: float) -> tuple[Named, Named, str]:
        kept, held = hold_out(strata(train), fraction, seed)
        told = f"{len(held)} rows held out of train, stratified, seed {seed}"
        return train.take(kept), train.take(held), told

    return cut


def parted(rows: list[Part], fraction: float, seed: int, what: str) -> tuple[list[Part], list[Part]]:
    """(kept, held) of equals, in their order; see `drawn`."""
    held = drawn(len(rows), fraction, seed, what)
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def drawn(count: int, fraction: float, seed: int, what: str) -> set[int]:
    """Numbers of the held-out ones of `count` equals, at least one.

    Raises:
        InputError: None would be left.
    """
    held = max(1, round(count * fraction))
    if held >= count:
        raise InputError(
            f"data: expected at least two {what} to hold one out, found {count}: there would be nothing to measure on"
        )
    return set(np.random.default_rng(seed).permutation(count)[:held].tolist())


def whole(
    named: dict[str, Named],
    notes: dict[str, int | str],
    config: DataConfig,
    labels: tuple[str, ...],
    numbered: Callable[[Any], Any],
) -> Splits:
    parts = {
        split: Examples(part.texts, part.pairs, [numbered(each) for each in part.labels])
        for split, part in named.items()
    }
    unlabelled = load_unlabelled(config)
    check_pairs(parts | ({"unlabelled": unlabelled} if len(unlabelled) else {}))
    notes["test_texts_also_in_train"] = overlap(parts["test"], parts["train"])
    return Splits(labels, parts["train"], parts["validation"], parts["test"], unlabelled, notes)


def clean(
    table: pa.Table,
    config: DataConfig,
    split: str,
    parse: Callable[[Any, str], Any] | None = None,
    *,
    bare: bool = False,
    labels: tuple[str, ...] = LABEL,
) -> Named:
    """Strips the texts and drops the rows that hold none; `bare` rows need no label. The column with the labels is
    found by one of the names `labels`.
    """
    where = f"data {config.path!r}, {split}"
    columns = find_columns(table, config, where, labels=labels)
    texts = strings(table, columns.text)
    pairs = strings(table, columns.text_pair) if columns.text_pair else None
    assert columns.label is not None
    kept = [i for i, text in enumerate(texts) if text and (pairs is None or pairs[i])]
    spelt = strings(table, columns.label)
    missing = [] if bare else [i + 1 for i in kept if not spelt[i]]
    if missing:
        raise InputError(
            f"{where}: {len(missing)} rows have no label in column {columns.label!r}, the first is row {missing[0]}; "
            "put unlabelled text in a file of its own and pass it with --data.unlabelled"
        )
    if not kept:
        raise InputError(f"{where}: column {columns.text!r} holds no text in any of {len(texts)} rows")
    read: list[Any] = spelt
    if parse is not None:
        cells = table[columns.label].to_pylist()
        read = [parse(cell, f"{where}, row {i + 1}, column {columns.label!r}") for i, cell in enumerate(cells)]
    return Named(texts, pairs, read, len(texts) - len(kept)).take(kept)


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
        check_known(split, Counter(name for name in part.labels if name not in seen))
    return in_order(seen)


def in_order(names: Collection[str]) -> tuple[str, ...]:
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))  # 7 and 007 are two labels
    return tuple(sorted(names))


def check_known(split: str, extra: Counter[str], what: str = "labels", where: str = "rows") -> None:
    """
    Raises:
        InputError: There are labels that train doesn't have.
    """
    if extra:
        listed = ", ".join(f"{name!r} ({count} {where})" for name, count in extra.most_common(5))
        raise InputError(f"data: {split} has {what} that train lacks: {listed}; no model could ever predict them")


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
    return bare(table, config, f"unlabelled text {config.unlabelled!r}")


def load_bare(config: DataConfig) -> Examples:
    """Every training text, held out later or not, and the unlabelled ones; no label is read.

    Raises:
        InputError: No text column, or no text in it.
    """
    where = f"data {config.path!r}, train"
    found = bare(read_splits(config.path, config.subset)["train"], config, where)
    if not len(found):
        raise InputError(f"{where}: expected text, found none in any row")
    more = load_unlabelled(config)
    check_pairs({"train": found, "unlabelled": more} if len(more) else {})
    return found.joined(more)


def bare(table: pa.Table, config: DataConfig, where: str) -> Examples:
    columns = find_columns(table, config, where, labelled=False)
    texts = strings(table, columns.text)
    pairs = strings(table, columns.text_pair) if columns.text_pair else None
    kept = [i for i, text in enumerate(texts) if text and (pairs is None or pairs[i])]
    return Examples([texts[i] for i in kept], [pairs[i] for i in kept] if pairs else None)
