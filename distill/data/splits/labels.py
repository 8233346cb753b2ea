"""Checks of labels: missing ones, ids, unlabelled marks, similar spellings, and labels that train lacks."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.cells import is_number
from distill.data.sources.quoting import MISSING, find_unquoted
from distill.data.sources.text_column import iterate_cells, strip_texts
from distill.data.splits.findings import Findings, format_rows
from distill.errors import InputError

UNLABELLED = re.compile(r"-1(\.0*)?")  # marks a row without a label in data sets of the hub


def missing_labels(table: pa.Table, column: str) -> np.ndarray:
    """Returns for each cell whether it has no label, bool [rows].

    These are empty cells, NaN among numbers, and the words that pandas reads as missing if they are unquoted in a csv
    file. Any other text, quoted or from another format, is a label.
    """
    texts, unquoted = strip_texts(table[column]), find_unquoted(table, column)
    if texts is not None:
        missing = ~texts.find_nonempty()
    else:
        missing = np.fromiter(map(is_missing, iterate_cells(table[column])), bool, len(table))
    return missing if unquoted is None else missing | unquoted


def is_missing(cell: object) -> bool:
    """Returns whether a cell is null, NaN or blank text."""
    return (
        cell is None or (isinstance(cell, float) and math.isnan(cell)) or (isinstance(cell, str) and not cell.strip())
    )


def has_labels(table: pa.Table, column: str, known: Collection[str] = ()) -> bool:
    """Returns whether any cell has a label; -1 is not a label unless it is in `known`."""
    missing = missing_labels(table, column)
    cells = (
        str(cell).strip() for cell, absent in zip(iterate_cells(table[column]), missing, strict=True) if not absent
    )
    return any(cell in known or not UNLABELLED.fullmatch(cell) for cell in cells)


def check_missing(rows: Sequence[int], where: str, column: str, cells: Sequence[object]) -> None:
    """Checks that no rows lack a label.

    Args:
        rows: Numbers of the rows without a label, from 1.
        where: Description of the table, for the message.
        column: Name of the label column.
        cells: Contents of these rows' label cells.

    Raises:
        InputError: There are rows without a label.
    """
    if not rows:
        return
    words = sorted({str(cell) for cell in cells if isinstance(cell, str) and cell.strip()})
    hint = "put unlabelled text in a file of its own and pass it with --data.unlabelled"
    if words:
        hint += f'; if {words[0]!r} is the name of a class, write it in quotes: "{words[0]}"'
    what = f" ({', '.join(map(repr, words[:3]))} without quotes)" if words else ""
    raise InputError(
        f"{where}: column {column!r} contains no label{what} in {format_rows([*rows])}, {len(rows):,} in all; {hint}"
    )


def read_label_names(labels: Sequence[str], findings: Findings) -> tuple[str, ...]:
    """Returns train's labels in a fixed order: by number if all are integers, else by name.

    Raises:
        InputError: There are fewer than two labels, or as many as rows (more than 3).
    """
    seen = Counter(labels)
    if len(seen) < 2:
        raise InputError(
            f"data: expected at least two classes in train, found {len(seen)} ({', '.join(sorted(seen))}): "
            "every model would be right without reading the text"
        )
    _check_ids(seen, findings)
    report_spellings(seen, findings)
    return order_labels(seen)


def order_labels(names: Collection[str]) -> tuple[str, ...]:
    """Returns labels in a fixed order: by number if all are integers, else by name."""
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))  # 7 and 007 are different labels
    return tuple(sorted(names))


def _check_ids(seen: Counter[str], findings: Findings) -> None:
    """Checks that labels are shared by rows, and adds a remark if most of 20 or more rows have a unique label.

    Raises:
        InputError: Each of more than 3 rows has a unique label.
    """
    rows, unique = seen.total(), sum(count == 1 for count in seen.values())
    first = ", ".join(map(repr, list(seen)[:3]))
    if len(seen) == rows > 3:
        raise InputError(
            f"data: expected classes that rows of train share, found a label of its own in each of {rows:,} rows "
            f"({first}, …): these are ids, numbers (--task regression) or texts, and nothing can be learnt from them; "
            "name the column of the labels with --data.label"
        )
    if rows >= 20 and 2 * unique > rows:
        findings.remarks.append(
            f"train: {unique:,} of {rows:,} rows have a label of their own ({first}, …): if these are ids or numbers, "
            "name another column with --data.label"
        )


def check_marks(labels: Sequence[str], numbers: Iterable[int], findings: Findings) -> None:
    """Checks whether a -1 among train's labels marks rows without a label.

    It is a class if there are other negative numbers or the only other label is 1; beside 0 alone, or 0 and 1, it is
    taken for a class with a remark; beside any other labels it is the mark.

    Raises:
        InputError: -1 marks rows without a label; the rows are named by their `numbers`.
    """
    others = {label for label in labels if not UNLABELLED.fullmatch(label)}
    rows = [number for number, label in zip(numbers, labels, strict=True) if UNLABELLED.fullmatch(label)]
    if not rows or not others:
        return
    values = {float(label) for label in others} if all(map(is_number, others)) else {math.nan}
    if min(values) < 0 or values == {1}:  # such as -2 to 2, or -1 and 1
        return
    if values <= {0, 1}:
        findings.remarks.append(
            f"train: -1 is taken for a class beside {' and '.join(order_labels(others))} ({len(rows):,} rows, "
            f"{format_rows(rows)}); if it marks rows without a label, leave them out"
        )
        return
    raise InputError(
        f"data, train: {len(rows):,} rows have the label -1, {format_rows(rows)}, beside "
        f"{', '.join(order_labels(others)[:5])}: it marks rows without a label, and would be learnt as a class; put "
        "them in a file of their own and pass it with --data.unlabelled, or name another column with --data.label"
    )


def report_spellings(seen: Counter[str], findings: Findings, what: str = "labels") -> None:
    """Adds remarks on labels that differ only in spelling, such as `01`, `1` and `1.0`, or `Spam` and `spam`.

    Also adds a remark on labels whose names look like missing values.
    """
    alike: dict[float | str, list[str]] = {}
    for name in order_labels(seen):
        alike.setdefault(_normalize_label(name), []).append(name)
    for names in alike.values():
        if len(names) > 1:
            listed = ", ".join(f"{name!r} ({seen[name]:,})" for name in names)
            findings.remarks.append(f"train: {what} {listed} are different {what}, though they are spelled alike")
    listed = ", ".join(f"{name!r} ({seen[name]:,} rows)" for name in seen if name in MISSING)
    if listed:
        findings.remarks.append(f"train: {listed} counts as a name, for it is text in the file, and no missing label")


def _normalize_label(name: str) -> float | str:
    """Returns a key that is equal for labels that differ only in spelling: the number, or the case-folded text."""
    return float(name) if is_number(name) else " ".join(name.casefold().split())


def find_known_rows(
    split: str,
    labels: Sequence[Iterable[str]],
    known: Collection[str],
    config: DataConfig,
    findings: Findings,
    what: str = "labels",
    where: str = "rows",
) -> list[int]:
    """Returns the indices of the rows all of whose labels are in train; the others are dropped if so configured.

    Raises:
        InputError: There are labels that are not in train and rows with them aren't to be dropped, or no row is left.
    """
    rows = [list(each) for each in labels]
    extra = Counter(name for row in rows for name in row if name not in known)
    known_rows = [i for i, row in enumerate(rows) if all(name in known for name in row)]
    listed = ", ".join(
        f"{name!r} ({count:,} {where}{_describe_similar(name, known)})" for name, count in extra.most_common(5)
    )
    if extra and config.unknown_labels == "error":
        raise InputError(
            f"data: {split} has {what} that train lacks: {listed}; no model could ever predict them; "
            "--data.unknown_labels drop leaves these rows out"
        )
    if not known_rows:
        raise InputError(
            f"data: {split}: expected rows with {what} of train, found none: {listed}; there would be nothing to "
            "evaluate on"
        )
    if config.unknown_labels == "drop":
        dropped = len(rows) - len(known_rows)
        remark = f"{split}: {dropped:,} of {len(rows):,} rows were left out, for train lacks their {what}: {listed}"
        findings.add(f"{split}_dropped_unknown_labels", dropped, remark)
    return known_rows


def _describe_similar(name: str, known: Collection[str]) -> str:
    similar = sorted(other for other in known if _normalize_label(other) == _normalize_label(name))
    return f", where train has {similar[0]!r}" if similar else ""
