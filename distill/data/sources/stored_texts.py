"""Texts in a parquet file that are read one after another, where all of them at once may not fit into memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from distill.data.sources.tables import open_parquet
from distill.data.sources.text_column import TextColumn

TEXTS_IN_ARRAY = 8192
GROUP_ROWS, GROUP_BYTES = 1 << 20, 64 << 20  # maximum sizes of a row group; the rows are pyarrow's own default
_SCHEMA = pa.schema([("text", pa.string())])


@dataclass(frozen=True)
class StoredTexts(Sequence[str]):
    """A sequence of the texts in the first column of a parquet file, or of some of them, in the file's order.

    Iteration reads a few thousand at a time. Reading a single text reads the file up to it: `take` reads many at once.

    Args:
        file: The file; a column of strings without nulls.
        chosen: The rows that belong to the sequence, bool [rows of the file]; all if None.
    """

    file: Path
    chosen: np.ndarray | None = None

    @classmethod
    def write(cls, file: Path, texts: Iterable[str]) -> "StoredTexts":
        """Writes texts to a new file."""
        remaining = iter(texts)
        blocks = iter(lambda: pa.array(islice(remaining, TEXTS_IN_ARRAY), pa.string()), pa.array([], pa.string()))
        _write_arrays(file, blocks)
        return cls(file)

    def copy_to(self, file: Path) -> None:
        """Writes the texts to a file, as pyarrow writes a table of them that fits into a row group."""
        _write_arrays(file, self.iterate_arrays())

    def __len__(self) -> int:
        return int(open_parquet(self.file).metadata.num_rows if self.chosen is None else self.chosen.sum())

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> TextColumn: ...
    def __getitem__(self, row: int | slice) -> str | TextColumn:
        count = len(self)
        if isinstance(row, slice):
            return self.take(range(*row.indices(count)))
        if not -count <= row < count:
            raise IndexError(row)
        return self.take([row % count])[0]

    def __iter__(self) -> Iterator[str]:
        for array in self.iterate_arrays():
            yield from array.to_pylist()

    def iterate_arrays(self) -> Iterator[pa.Array]:
        """Yields the texts as Arrow arrays of a few thousand."""
        first, opened = 0, open_parquet(self.file)
        groups = range(opened.num_row_groups)
        # A row group at a time: Arrow holds what it has read of all of them until the last batch.
        batches = (opened.iter_batches(TEXTS_IN_ARRAY, row_groups=[group], use_threads=False) for group in groups)
        for batch in chain.from_iterable(batches):
            array = batch.column(0)
            if self.chosen is not None:
                array = array.filter(pa.array(self.chosen[first : first + len(batch)]))
            first += len(batch)
            if len(array):
                yield array

    def load(self) -> TextColumn:
        """Returns all texts in memory."""
        return TextColumn(pa.chunked_array(list(self.iterate_arrays()), pa.string()))

    def take(self, rows: Sequence[int] | np.ndarray) -> TextColumn:
        """Returns the texts of these rows in memory, in their order."""
        numbers = np.asarray(rows, np.int64)
        wanted, places = np.unique(numbers, return_inverse=True)
        parts, first = [pa.array([], pa.string())], 0
        for array in self.iterate_arrays():
            start, stop = np.searchsorted(wanted, [first, first + len(array)])
            parts.append(array.take(pa.array(wanted[start:stop] - first)))
            first += len(array)
            if stop == len(wanted):
                break
        return TextColumn(pa.chunked_array(parts)).take(places)

    def separate(self, held_out: np.ndarray) -> tuple["StoredTexts", "StoredTexts"]:
        """Returns (the other texts, those of the rows `held_out`), each in order; bool [texts]."""
        chosen = np.ones(len(held_out), bool) if self.chosen is None else self.chosen
        remaining, taken = chosen.copy(), chosen.copy()
        remaining[chosen], taken[chosen] = ~held_out, held_out
        return replace(self, chosen=remaining), replace(self, chosen=taken)


def _write_arrays(file: Path, arrays: Iterable[pa.Array]) -> None:
    """Writes arrays of texts as row groups of at most GROUP_ROWS rows and about GROUP_BYTES bytes."""
    pending: list[pa.Array] = []
    with pa.parquet.ParquetWriter(file, _SCHEMA) as writer:

        def write() -> None:
            # In one piece, so that equal texts are written as equal bytes.
            column = pa.chunked_array(pending, pa.string()).combine_chunks()
            writer.write_table(pa.table({"text": column}), row_group_size=GROUP_ROWS)
            pending.clear()

        for array in arrays:
            room = GROUP_ROWS - sum(map(len, pending))
            pending.append(array.slice(0, room))
            if len(array) >= room or sum(each.nbytes for each in pending) >= GROUP_BYTES:
                write()
            if len(array) > room:
                pending.append(array.slice(room))
        if pending:
            write()
