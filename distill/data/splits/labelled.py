"""Labelled splits from raw tables: cleaning, checks, held-out rows, and overlap between splits."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.cells import a_number, hot_labels, hot_width, is_number, several_labels
from distill.data.sources.columns import LABEL, SCORE, find_columns
from distill.data.sources.tables import read_splits, read_table
from distill.data.sources.text_column import (
    TextColumn,
    iterate_cells,
    join_texts,
    select_texts,
    strip_texts,
    text_array,
)
from distill.data.splits.evaluated import label_column, read_evaluated
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import check_sizes, hold_out, hold_out_missing
from distill.data.splits.labels import (
    check_marks,
    check_missing,
    has_labels,
    in_order,
    is_missing,
    known_rows,
    label_names,
    missing_labels,
    report_spellings,
)
from distill.data.splits.overlap import report_overlap
from distill.errors import InputError


@dataclass(frozen=True)
class Examples:
    """Texts with labels: a class id each, or a 1 or 0 for each of several labels, or a number; none if unknown.

    The texts of a data set are stored in Arrow (`TextColumn`), and become Python strings batch by batch.
    """

    texts: Sequence[str]
    pairs: Sequence[str] | None = None
    labels: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def table(self) -> pa.Table:
        """Returns the examples as a table; the inverse of `from_table`."""
        columns: dict[str, Any] = {"text": text_array(self.texts)}
        if self.pairs is not None:
            columns["text_pair"] = text_array(self.pairs)
        return pa.table(columns | ({"label": pa.array(self.labels)} if self.labels else {}))

    @classmethod
    def from_table(cls, table: pa.Table) -> "Examples":
        """Returns the examples of a table that `table` returned."""
        pairs = TextColumn(table["text_pair"]) if "text_pair" in table.column_names else None
        labels = table["label"].to_pylist() if "label" in table.column_names else []
        return cls(TextColumn(table["text"]), pairs, labels)

    def join(self, other: "Examples") -> "Examples":
        """Returns the texts of both, in order, without labels."""
        pairs = None if self.pairs is None else join_texts(self.pairs, other.pairs or [])
        return Examples(join_texts(self.texts, other.texts), pairs)

    def take(self, rows: Sequence[int]) -> "Examples":
        pairs = None if self.pairs is None else select_texts(self.pairs, rows)
        return Examples(select_texts(self.texts, rows), pairs, [self.labels[i] for i in rows] if self.labels else [])


@dataclass(frozen=True)
class Splits:
    """The data of a run, in the task's type: `Examples`, `Tagged` or another.

    `notes` are counts of dropped, held-out and overlapping rows; `remarks` are sentences about them for the user.
    """

    labels: tuple[str, ...]
    train: Any
    validation: Any
    test: Any
    unlabelled: Any
    notes: dict[str, int | str]
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class LabelledRows:
    """Rows of one split with their labels as in the file, or as parsed for a task, and row numbers in the file."""

    texts: Sequence[str]
    pairs: Sequence[str] | None
    labels: list[Any]
    numbers: np.ndarray

    def take(self, rows: Sequence[int] | np.ndarray) -> "LabelledRows":
        """Returns some of the rows, in their order."""
        pairs = select_texts(self.pairs, rows) if self.pairs is not None else None
        labels = [self.labels[i] for i in rows]
        return LabelledRows(select_texts(self.texts, rows), pairs, labels, self.numbers[np.asarray(rows, np.int64)])


def load_splits(config: DataConfig, seed: int = 0) -> Splits:
    """Reads, checks and splits a data set with one class per row.

    Args:
        config: Which data to read.
        seed: Seed for drawing held-out rows, if the data set lacks a split.

    Raises:
        InputError: `read_splits` or `find_columns` fails; train has fewer than two classes, or one for each row; a row
            has no label; validation or test has a label that is not in train, unless such rows are to be dropped; only
            some splits have a pair column.
    """
    named, findings = read_named(config)
    check_marks(named["train"].labels, named["train"].numbers, findings)
    labels = label_names(named["train"].labels, findings)
    check_sizes(named["train"].labels, absent(named))
    hold_out_missing(named, findings, config, by_strata(seed, lambda part: part.labels))
    keep_known(named, lambda name: [name], labels, config, findings)
    number = {name: i for i, name in enumerate(labels)}
    return build_splits(named, findings, config, labels, lambda name: number[name])


def load_labelled(config: DataConfig, seed: int = 0) -> Splits:
    """Loads a data set like `load_splits`, for rows with any number of labels.

    A cell contains a list of labels, JSON of one, names separated by `|` or `;`, or a list with a 0 or 1 for each
    label, which is then named by its position. A row's labels become a list with 1 for each of its labels and 0 for the
    others.
    """
    named, findings = read_named(config, lambda cell, where: (cell, where), bare=True)
    width = hot_width([cell for cell, _ in named["train"].labels])  # train's format holds for all splits
    read = partial(hot_labels, width=width) if width else several_labels
    named = {
        split: replace(part, labels=[read(cell, where) for cell, where in part.labels]) for split, part in named.items()
    }
    check_sizes([""] * len(named["train"].texts), absent(named))
    hold_out_missing(named, findings, config, by_strata(seed, lambda part: [""] * len(part.texts)))
    seen = Counter(name for names in named["train"].labels for name in names)
    if not seen:
        raise InputError("data: expected labels in train, found none in any row: there is nothing to learn")
    if not width:
        report_spellings(seen, findings)
    keep_known(named, lambda names: names, seen, config, findings)
    labels = in_order(seen)
    return build_splits(named, findings, config, labels, lambda names: [int(name in names) for name in labels])


def load_numbers(config: DataConfig, seed: int = 0) -> Splits:
    """Loads a data set like `load_splits`, for rows with a number each.

    Raises:
        InputError: A cell is not a number, or all rows have the same number.
    """
    named, findings = read_named(config, a_number, labels=(*LABEL, *SCORE))
    if len(set(named["train"].labels)) == 1:
        raise InputError(
            f"data: expected different numbers in train, found {named['train'].labels[0]:g} in each of "
            f"{len(named['train'].texts):,} rows: every model would be right without looking"
        )
    check_sizes([""] * len(named["train"].texts), absent(named))
    hold_out_missing(named, findings, config, by_strata(seed, lambda part: [""] * len(part.texts)))
    return build_splits(named, findings, config, (NUMBER,), float)


NUMBER = "number"  # name of the single output of a regression model


def read_named(
    config: DataConfig,
    parse: Callable[[Any, str], Any] | None = None,
    *,
    bare: bool = False,
    labels: tuple[str, ...] = LABEL,
) -> tuple[dict[str, LabelledRows], Findings]:
    findings = Findings()
    tables = read_evaluated(config, findings, partial(holds_labels, config, labels, classes=parse is None))
    named = {
        split: clean(table, config, split, findings, parse, bare=bare, labels=labels) for split, table in tables.items()
    }
    return named, findings


def holds_labels(
    config: DataConfig, labels: tuple[str, ...], tables: Mapping[str, pa.Table], split: str, *, classes: bool
) -> bool:
    """Returns whether a split has any label; with `classes`, -1 counts as a label if train has it.

    True if neither the split nor train has a label column.
    """
    own, trained = (label_column(tables[each], config, labels) for each in (split, "train"))
    if own is None:
        return trained is None  # if train has no such column either, `find_columns` raises
    known = set(strings(tables["train"], trained)) if classes and trained else set()
    return has_labels(tables[split], own, known)


def absent(parts: Mapping[str, Any]) -> list[str]:
    return [split for split in ("validation", "test") if split not in parts]


def keep_known(
    named: dict[str, LabelledRows],
    names_of: Callable[[Any], Collection[str]],
    known: Collection[str],
    config: DataConfig,
    findings: Findings,
) -> None:
    """Drops the rows of validation and test with labels that are not in train, or rejects them; see `known_rows`."""
    for split in ("validation", "test"):
        names = [names_of(label) for label in named[split].labels]
        named[split] = named[split].take(known_rows(split, names, known, config, findings))


def by_strata(
    seed: int, strata: Callable[[LabelledRows], list[str]]
) -> Callable[[LabelledRows, float], tuple[LabelledRows, LabelledRows, str]]:
    """Returns a function that holds out the same share of each stratum."""

    def cut(train: LabelledRows, fraction: float) -> tuple[LabelledRows, LabelledRows, str]:
        kept, held = hold_out(strata(train), fraction, seed)
        words = f"{len(held)} rows held out of train, stratified, seed {seed}"
        return train.take(kept), train.take(held), words

    return cut


def build_splits(
    named: dict[str, LabelledRows],
    findings: Findings,
    config: DataConfig,
    labels: tuple[str, ...],
    numbered: Callable[[Any], Any],
) -> Splits:
    parts = {
        split: Examples(part.texts, part.pairs, [numbered(each) for each in part.labels])
        for split, part in named.items()
    }
    unlabelled = load_unlabelled(config, findings)
    check_pairs(parts | ({"unlabelled": unlabelled} if len(unlabelled) else {}))
    unlabelled = unlabelled.take(report_overlap(parts | {"unlabelled": unlabelled}, findings))
    return Splits(
        labels, parts["train"], parts["validation"], parts["test"], unlabelled, findings.counts, findings.remarks
    )


def clean(
    table: pa.Table,
    config: DataConfig,
    split: str,
    findings: Findings,
    parse: Callable[[Any, str], Any] | None = None,
    *,
    bare: bool = False,
    labels: tuple[str, ...] = LABEL,
) -> LabelledRows:
    """Strips the texts and drops the rows without text; with `bare`, rows need no label. The label column is found by
    one of the names `labels`.
    """
    where = f"data {config.path!r}, {split}"
    columns = find_columns(table, config, where, labels=labels)
    texts = strings(table, columns.text)
    pairs = strings(table, columns.text_pair) if columns.text_pair else None
    assert columns.label is not None
    full = full_rows(texts, pairs)
    kept = np.flatnonzero(full)
    findings.add_dropped_empty(split, len(texts) - len(kept), len(texts))
    cells, missing = table[columns.label], missing_labels(table, columns.label)
    unlabelled = {i: cells[i].as_py() for i in np.flatnonzero(full & missing).tolist()}
    without = {i: cell for i, cell in unlabelled.items() if not (bare and is_empty(cell))}
    check_missing([i + 1 for i in without], where, columns.label, [*without.values()])
    if not len(kept):
        raise InputError(f"{where}: column {columns.text!r} holds no text in any of {len(texts)} rows")
    read: list[Any] = [None] * len(texts)
    rows = LabelledRows(texts, pairs, read, np.arange(1, len(texts) + 1)).take(kept)
    check_texts(rows.texts, rows.pairs or [], split, columns.text, findings)
    if parse is None:
        names = label_strings(table, columns.label)
        return replace(rows, labels=[names[i] for i in kept])
    parsed = (
        parse(cell, f"{where}, row {i + 1}, column {columns.label!r}")
        for i, (cell, is_full) in enumerate(zip(iterate_cells(cells), full, strict=True))
        if is_full
    )
    return replace(rows, labels=list(parsed))


def full_rows(texts: Sequence[str], pairs: Sequence[str] | None) -> np.ndarray:
    """Returns which rows have text, and text in both columns if there are pairs, bool [rows]."""
    both = [each for each in (texts, pairs) if each is not None]
    full = (
        each.find_nonempty() if isinstance(each, TextColumn) else np.fromiter(map(bool, each), bool, len(each))
        for each in both
    )
    found: np.ndarray = np.logical_and.reduce([*full])
    return found


def is_empty(cell: object) -> bool:
    """Returns whether a cell is empty; a word such as NaN is not."""
    return cell is None or (isinstance(cell, str) and not cell.strip())


def check_texts(texts: Sequence[str], pairs: Sequence[str], split: str, column: str, findings: Findings) -> None:
    """Checks that the texts differ, and adds a remark if all of them are numbers.

    Raises:
        InputError: There are more than two rows, all with the same text.
    """
    if len(texts) > 2 and are_equal(texts) and (not len(pairs) or are_equal(pairs)):
        raise InputError(
            f"data, {split}: column {column!r}: expected different texts, found {texts[0][:60]!r} in each of "
            f"{len(texts):,} rows: no model could tell them apart; name the column with --data.text"
        )
    if len(texts) > 2 and all(map(is_number, texts)):
        findings.remarks.append(
            f"{split}: every text in column {column!r} is a number, such as {texts[0][:60]!r}; if that isn't the text, "
            "name the column with --data.text"
        )


def are_equal(texts: Sequence[str]) -> bool:
    """Returns whether all texts are the same; stops at the first that differs."""
    first = texts[0]
    return all(text == first for text in texts)


def strings(table: pa.Table, column: str) -> Sequence[str]:
    """Returns the cells of a column as texts without surrounding whitespace, empty for missing ones."""
    texts = strip_texts(table[column])
    return label_strings(table, column) if texts is None else texts


def label_strings(table: pa.Table, column: str) -> list[str]:
    """Returns the cells of a column as `strings` does; equal texts are the same object, of which few are made."""
    known: dict[Any, str] = {}
    found = []
    for cell in iterate_cells(table[column]):
        text = "" if is_missing(cell) else str(cell).strip()
        found.append(known.setdefault(text, text))
    return found


def check_pairs(parts: dict[str, Examples]) -> None:
    with_pair = sorted(split for split, part in parts.items() if part.pairs is not None)
    if with_pair and len(with_pair) != len(parts):
        raise InputError(f"data: only {', '.join(with_pair)} has a second text: the model would see other inputs")


def load_unlabelled(config: DataConfig, findings: Findings) -> Examples:
    if config.unlabelled is None:
        return Examples([], None)
    table = read_table(Path(config.unlabelled).expanduser())
    found = bare(table, config, f"unlabelled text {config.unlabelled!r}")
    findings.add_dropped_empty("unlabelled", len(table) - len(found), len(table))
    return found


def load_bare(config: DataConfig) -> Examples:
    """Returns every training text, held out later or not, and the unlabelled ones; labels are not read.

    Raises:
        InputError: There is no text column, or no text in it.
    """
    where = f"data {config.path!r}, train"
    found = bare(read_splits(config.path, config.subset)["train"], config, where)
    if not len(found):
        raise InputError(f"{where}: expected text, found none in any row")
    more = load_unlabelled(config, Findings())
    check_pairs({"train": found, "unlabelled": more} if len(more) else {})
    return found.join(more)


def bare(table: pa.Table, config: DataConfig, where: str) -> Examples:
    columns = find_columns(table, config, where, labelled=False)
    texts = strings(table, columns.text)
    pairs = strings(table, columns.text_pair) if columns.text_pair else None
    kept = np.flatnonzero(full_rows(texts, pairs))
    return Examples(select_texts(texts, kept), select_texts(pairs, kept) if pairs is not None else None)
