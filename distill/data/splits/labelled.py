"""Labelled splits from raw tables: classes, several labels or numbers, held-out rows, and overlap between splits."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.cells import find_multi_hot_width, parse_labels, parse_multi_hot, parse_number
from distill.data.sources.columns import LABEL, SCORE, find_columns
from distill.data.sources.tables import read_splits, read_table
from distill.data.sources.text_column import select_texts
from distill.data.splits.evaluated import find_label_column, read_evaluated
from distill.data.splits.examples import Examples, Splits
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import check_strata, hold_out, hold_out_missing
from distill.data.splits.labels import (
    check_marks,
    find_known_rows,
    has_labels,
    order_labels,
    read_label_names,
    report_spellings,
)
from distill.data.splits.overlap import report_overlap
from distill.data.splits.raw_rows import LabelledRows, ParseLabel, find_full_rows, read_raw_rows, read_strings
from distill.errors import InputError

_NUMBER = "number"  # name of the single output of a regression model


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
    rows, findings = _read_rows(config)
    check_marks(rows["train"].labels, rows["train"].numbers, findings)
    labels = read_label_names(rows["train"].labels, findings)
    check_strata(rows["train"].labels, find_missing_splits(rows))
    hold_out_missing(rows, findings, config, hold_out_by_stratum(seed, lambda part: part.labels))
    _select_known(rows, lambda name: [name], labels, config, findings)
    ids = {name: i for i, name in enumerate(labels)}
    return _build_splits(rows, findings, config, labels, lambda name: ids[name])


def load_labelled(config: DataConfig, seed: int = 0) -> Splits:
    """Loads a data set like `load_splits`, for rows with any number of labels.

    A cell contains a list of labels, JSON of one, names separated by `|` or `;`, or a list with a 0 or 1 for each
    label, which is then named by its position. A row's labels become a list with 1 for each of its labels and 0 for the
    others.
    """
    rows, findings = _read_rows(config, lambda cell, where: (cell, where), allow_unlabelled=True)
    width = find_multi_hot_width([cell for cell, _ in rows["train"].labels])  # train's format holds for all splits
    parse = partial(parse_multi_hot, width=width) if width else parse_labels
    rows = {
        split: replace(part, labels=[parse(cell, where) for cell, where in part.labels]) for split, part in rows.items()
    }
    check_strata([""] * len(rows["train"].texts), find_missing_splits(rows))
    hold_out_missing(rows, findings, config, hold_out_by_stratum(seed, lambda part: [""] * len(part.texts)))
    seen = Counter(name for names in rows["train"].labels for name in names)
    if not seen:
        raise InputError("data: expected labels in train, found none in any row: there is nothing to learn")
    if not width:
        report_spellings(seen, findings)
    _select_known(rows, lambda names: names, seen, config, findings)
    labels = order_labels(seen)
    return _build_splits(rows, findings, config, labels, lambda names: [int(name in names) for name in labels])


def load_numbers(config: DataConfig, seed: int = 0) -> Splits:
    """Loads a data set like `load_splits`, for rows with a number each.

    Raises:
        InputError: A cell is not a number, or all rows have the same number.
    """
    rows, findings = _read_rows(config, parse_number, label_columns=(*LABEL, *SCORE))
    if len(set(rows["train"].labels)) == 1:
        raise InputError(
            f"data: expected different numbers in train, found {rows['train'].labels[0]:g} in each of "
            f"{len(rows['train'].texts):,} rows: every model would be right without reading the text"
        )
    check_strata([""] * len(rows["train"].texts), find_missing_splits(rows))
    hold_out_missing(rows, findings, config, hold_out_by_stratum(seed, lambda part: [""] * len(part.texts)))
    return _build_splits(rows, findings, config, (_NUMBER,), float)


def load_all_texts(config: DataConfig) -> Examples:
    """Returns every training text, held out later or not, and the unlabelled ones; labels are not read.

    Raises:
        InputError: There is no text column, or no text in it.
    """
    where = f"data {config.path!r}, train"
    texts = _read_texts(read_splits(config.path, config.subset)["train"], config, where)
    if not len(texts):
        raise InputError(f"{where}: expected text, found none in any row")
    more = _load_unlabelled(config, Findings())
    _check_pairs({"train": texts, "unlabelled": more} if len(more) else {})
    return texts.join(more)


def find_missing_splits(parts: Mapping[str, object]) -> list[str]:
    """Returns which of validation and test are missing, and have to be held out of train."""
    return [split for split in ("validation", "test") if split not in parts]


def hold_out_by_stratum(
    seed: int, strata: Callable[[LabelledRows], list[str]]
) -> Callable[[LabelledRows, float], tuple[LabelledRows, LabelledRows, str]]:
    """Returns a function that holds out the same share of each stratum."""

    def cut(train: LabelledRows, fraction: float) -> tuple[LabelledRows, LabelledRows, str]:
        remaining, held_out = hold_out(strata(train), fraction, seed)
        description = f"{len(held_out)} rows held out of train, stratified, seed {seed}"
        return train.take(remaining), train.take(held_out), description

    return cut


def _read_rows(
    config: DataConfig,
    parse: ParseLabel | None = None,
    *,
    allow_unlabelled: bool = False,
    label_columns: tuple[str, ...] = LABEL,
) -> tuple[dict[str, LabelledRows], Findings]:
    """Returns the cleaned rows of every split with labels, and the findings; see `read_raw_rows`."""
    findings = Findings()
    tables = read_evaluated(config, findings, partial(_has_labels, config, label_columns, classes=parse is None))
    rows = {
        split: read_raw_rows(
            table,
            config,
            split,
            findings,
            parse,
            allow_unlabelled=allow_unlabelled,
            label_columns=label_columns,
        )
        for split, table in tables.items()
    }
    return rows, findings


def _has_labels(
    config: DataConfig, label_columns: tuple[str, ...], tables: Mapping[str, pa.Table], split: str, *, classes: bool
) -> bool:
    """Returns whether a split has any label; with `classes`, -1 counts as a label if train has it.

    True if neither the split nor train has a label column.
    """
    column, train_column = (find_label_column(tables[each], config, label_columns) for each in (split, "train"))
    if column is None:
        return train_column is None  # if train has no such column either, `find_columns` raises
    known = set(read_strings(tables["train"], train_column)) if classes and train_column else set()
    return has_labels(tables[split], column, known)


def _select_known(
    rows: dict[str, LabelledRows],
    names_of: Callable[[Any], Collection[str]],
    known: Collection[str],
    config: DataConfig,
    findings: Findings,
) -> None:
    """Drops the rows of validation and test with labels that are not in train, or rejects them.

    See `find_known_rows`; `names_of` returns the names of the labels of a row.
    """
    for split in ("validation", "test"):
        names = [names_of(label) for label in rows[split].labels]
        rows[split] = rows[split].take(find_known_rows(split, names, known, config, findings))


def _build_splits(
    rows: dict[str, LabelledRows],
    findings: Findings,
    config: DataConfig,
    labels: tuple[str, ...],
    encode: Callable[[Any], Any],
) -> Splits:
    """Returns the splits with labels as `encode` returns them for those in `rows`, and the unlabelled texts."""
    parts = {
        split: Examples(part.texts, part.pairs, [encode(each) for each in part.labels]) for split, part in rows.items()
    }
    unlabelled = _load_unlabelled(config, findings)
    _check_pairs(parts | ({"unlabelled": unlabelled} if len(unlabelled) else {}))
    unlabelled = unlabelled.take(report_overlap(parts | {"unlabelled": unlabelled}, findings))
    return Splits(
        labels, parts["train"], parts["validation"], parts["test"], unlabelled, findings.counts, findings.remarks
    )


def _check_pairs(parts: dict[str, Examples]) -> None:
    with_pair = sorted(split for split, part in parts.items() if part.pairs is not None)
    if with_pair and len(with_pair) != len(parts):
        raise InputError(f"data: only {', '.join(with_pair)} has a second text: the model would see other inputs")


def _load_unlabelled(config: DataConfig, findings: Findings) -> Examples:
    if config.unlabelled is None:
        return Examples([], None)
    table = read_table(Path(config.unlabelled).expanduser())
    texts = _read_texts(table, config, f"unlabelled text {config.unlabelled!r}")
    findings.add_dropped_empty("unlabelled", len(table) - len(texts), len(table))
    return texts


def _read_texts(table: pa.Table, config: DataConfig, where: str) -> Examples:
    """Returns the texts of a table without labels and without empty rows."""
    columns = find_columns(table, config, where, labelled=False)
    texts = read_strings(table, columns.text)
    pairs = read_strings(table, columns.text_pair) if columns.text_pair else None
    nonempty = np.flatnonzero(find_full_rows(texts, pairs))
    return Examples(select_texts(texts, nonempty), select_texts(pairs, nonempty) if pairs is not None else None)
