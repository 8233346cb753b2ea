"""Texts with labels, and the splits of a data set."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from distill.data.sources.stored_texts import StoredTexts
from distill.data.sources.text_column import TextColumn, concatenate_texts, select_texts, text_array


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
        columns = {"text": text_array(self.texts)}
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
        pairs = None if self.pairs is None else concatenate_texts(self.pairs, other.pairs or [])
        return Examples(concatenate_texts(self.texts, other.texts), pairs)

    def take(self, rows: Sequence[int] | np.ndarray) -> "Examples":
        """Returns some of the examples, in the order of `rows`."""
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


def take_rows(part: Any, rows: np.ndarray) -> Any:
    """Returns some rows of a split, in the order of `rows`; of text in a file in its own order, without reading it."""
    if isinstance(part.texts, StoredTexts):
        selected = np.zeros(len(part), bool)
        selected[rows] = True
        return replace(part, texts=part.texts.separate(selected)[1])
    if isinstance(part, Examples):
        return part.take(rows)
    return type(part).from_table(part.table().take(pa.array(rows)))
