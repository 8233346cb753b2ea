"""Cleaning of raw tables: stripped texts, rows without text dropped, labels checked and parsed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.cells import is_number
from distill.data.sources.columns import LABEL, find_columns
from distill.data.sources.text_column import TextColumn, iterate_cells, select_texts, strip_texts
from distill.data.splits.findings import Findings
from distill.data.splits.labels import check_missing, is_missing, missing_labels
from distill.errors import InputError

ParseLabel = Callable[[Any, str], Any]  # a cell and its place in the data, for errors -> the label


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


def read_raw_rows(
    table: pa.Table,
    config: DataConfig,
    split: str,
    findings: Findings,
    parse: ParseLabel | None = None,
    *,
    allow_unlabelled: bool = False,
    label_columns: tuple[str, ...] = LABEL,
) -> LabelledRows:
    """Strips the texts and drops the rows without text.

    Args:
        table: The table of the split.
        config: Contains the columns, if they are set.
        split: Name of the split, for errors and findings.
        findings: Receives the number of dropped rows.
        parse: Parses the cells with labels; without it, labels are texts.
        allow_unlabelled: Whether rows with an empty label are accepted.
        label_columns: Well-known names of the label column.

    Raises:
        InputError: `find_columns` or `parse` fails, no row has text, all texts are the same, or a row has no label.
    """
    where = f"data {config.path!r}, {split}"
    columns = find_columns(table, config, where, labels=label_columns)
    texts = read_strings(table, columns.text)
    pairs = read_strings(table, columns.text_pair) if columns.text_pair else None
    assert columns.label is not None
    full = find_full_rows(texts, pairs)
    nonempty = np.flatnonzero(full)
    findings.add_dropped_empty(split, len(texts) - len(nonempty), len(texts))
    cells, missing = table[columns.label], missing_labels(table, columns.label)
    without_label = {i: cells[i].as_py() for i in np.flatnonzero(full & missing).tolist()}
    rejected = {i: cell for i, cell in without_label.items() if not (allow_unlabelled and _is_empty(cell))}
    check_missing([i + 1 for i in rejected], where, columns.label, [*rejected.values()])
    if not len(nonempty):
        raise InputError(f"{where}: column {columns.text!r} contains no text in any of {len(texts)} rows")
    unread: list[Any] = [None] * len(texts)
    rows = LabelledRows(texts, pairs, unread, np.arange(1, len(texts) + 1)).take(nonempty)
    _check_texts(rows.texts, rows.pairs or [], split, columns.text, findings)
    if parse is None:
        names = _read_cells_as_text(table, columns.label)
        return replace(rows, labels=[names[i] for i in nonempty])
    parsed = (
        parse(cell, f"{where}, row {i + 1}, column {columns.label!r}")
        for i, (cell, is_full) in enumerate(zip(iterate_cells(cells), full, strict=True))
        if is_full
    )
    return replace(rows, labels=list(parsed))


def find_full_rows(texts: Sequence[str], pairs: Sequence[str] | None) -> np.ndarray:
    """Returns which rows have text, and text in both columns if there are pairs, bool [rows]."""
    columns = [each for each in (texts, pairs) if each is not None]
    full = (
        each.find_nonempty() if isinstance(each, TextColumn) else np.fromiter(map(bool, each), bool, len(each))
        for each in columns
    )
    is_full: np.ndarray = np.logical_and.reduce([*full])
    return is_full


def read_strings(table: pa.Table, column: str) -> Sequence[str]:
    """Returns the cells of a column as texts without surrounding whitespace, empty for missing ones."""
    texts = strip_texts(table[column])
    return _read_cells_as_text(table, column) if texts is None else texts


def _read_cells_as_text(table: pa.Table, column: str) -> list[str]:
    """Returns the cells of a column as `read_strings` does; equal texts are the same object, of which few are made."""
    known: dict[str, str] = {}
    texts = []
    for cell in iterate_cells(table[column]):
        text = "" if is_missing(cell) else str(cell).strip()
        texts.append(known.setdefault(text, text))
    return texts


def _is_empty(cell: object) -> bool:
    """Returns whether a cell is empty; a word such as NaN is not."""
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _check_texts(texts: Sequence[str], pairs: Sequence[str], split: str, column: str, findings: Findings) -> None:
    """Checks that the texts differ, and adds a remark if all of them are numbers.

    Raises:
        InputError: There are more than two rows, all with the same text.
    """
    if len(texts) > 2 and _are_equal(texts) and (not len(pairs) or _are_equal(pairs)):
        raise InputError(
            f"data, {split}: column {column!r}: expected different texts, found {texts[0][:60]!r} in each of "
            f"{len(texts):,} rows: no model could distinguish them; name the column with --data.text"
        )
    if len(texts) > 2 and all(map(is_number, texts)):
        findings.remarks.append(
            f"{split}: every text in column {column!r} is a number, such as {texts[0][:60]!r}; if that isn't the text, "
            "name the column with --data.text"
        )


def _are_equal(texts: Sequence[str]) -> bool:
    """Returns whether all texts are the same; stops at the first that differs."""
    first = texts[0]
    return all(text == first for text in texts)
