"""Texts of a split as an Arrow array, of which only the rows that are read become Python strings."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute

# What `str.strip` removes, which is not quite what Arrow's own trimming does.
WHITESPACE = "".join(chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace())
BLOCK_ROWS = 1024  # converted together when a column is iterated


class TextColumn(Sequence[str]):
    """A sequence of texts that is stored in Arrow and equals the list of the same texts.

    A million short texts take their own bytes and 4 more each, as Python strings 50 to 100 more.

    Args:
        array: Texts without nulls.
    """

    def __init__(self, array: pa.ChunkedArray):
        self.array = array
        self.rows = len(array)

    @staticmethod
    def build(texts: Iterable[str]) -> "TextColumn":
        """Copies texts into a column."""
        return TextColumn(_as_chunked(pa.array(list(texts), pa.string())))

    def __len__(self) -> int:
        return self.rows

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> "TextColumn": ...
    def __getitem__(self, row: int | slice) -> "str | TextColumn":
        if isinstance(row, slice):
            first, last, step = row.indices(self.rows)
            if step != 1:
                return self.take(np.arange(first, last, step))
            return TextColumn(self.array.slice(first, max(0, last - first)))
        if not -self.rows <= row < self.rows:
            raise IndexError(row)
        text: str = self.array[int(row) % self.rows].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        return iterate_cells(self.array)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TextColumn):
            return bool(self.array.equals(other.array))
        if isinstance(other, list):
            return len(other) == self.rows and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[str]) -> "TextColumn":
        more = other if isinstance(other, TextColumn) else TextColumn.build(other)
        return TextColumn(pa.chunked_array([*self.array.chunks, *more.array.chunks], pa.string()))

    def __repr__(self) -> str:
        return f"TextColumn({self.rows:,} texts)"

    def take(self, rows: Sequence[int] | np.ndarray) -> "TextColumn":
        """Returns the texts of these rows, in their order."""
        if len(rows) == self.rows and np.array_equal(rows, np.arange(self.rows)):
            return self
        return TextColumn(_as_chunked(self.array.take(pa.array(np.asarray(rows, np.int64)))))

    def find_nonempty(self) -> np.ndarray:
        """Returns which texts have a character, bool [rows]."""
        return np.asarray(pa.compute.greater(pa.compute.binary_length(self.array), 0).to_numpy(), bool)


def _as_chunked(array: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def strip_texts(column: pa.ChunkedArray) -> TextColumn | None:
    """Returns the texts of a column of strings without surrounding whitespace, empty for null.

    None for columns of other types and for those that don't fit 32-bit offsets, whose cells are read one by one.
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        return None
    try:
        texts = column.cast(pa.string())
    except pa.ArrowInvalid:
        return None
    return TextColumn(pa.compute.utf8_trim(pa.compute.fill_null(texts, ""), characters=WHITESPACE))


def iterate_cells(column: pa.ChunkedArray) -> Iterator[Any]:
    """Yields the cells of a column as Python objects, of which only a block exists at a time."""
    for first in range(0, len(column), BLOCK_ROWS):
        yield from column.slice(first, BLOCK_ROWS).to_pylist()


def select_texts(texts: Sequence[str], rows: Sequence[int] | np.ndarray) -> Sequence[str]:
    """Returns the texts of these rows, as a column if they are one or `StoredTexts`."""
    take = getattr(texts, "take", None)
    return [texts[i] for i in rows] if take is None else take(rows)


def concatenate_texts(first: Sequence[str], second: Sequence[str]) -> Sequence[str]:
    """Returns the texts of both, in order, as a column if one of them is."""
    if isinstance(first, TextColumn):
        return first + second
    return TextColumn.build(first) + second if isinstance(second, TextColumn) else [*first, *second]


def text_array(texts: Sequence[str]) -> pa.Array | pa.ChunkedArray:
    """Returns texts as an Arrow array of strings in one piece, so that equal texts are written as equal bytes."""
    return texts.array.combine_chunks() if isinstance(texts, TextColumn) else pa.array(texts, pa.string())
