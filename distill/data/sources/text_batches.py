"""Texts of a source, one after another, where all of them at once may not fit into memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet

from distill.data.config import DataConfig
from distill.data.sources.columns import find_column, find_columns, missing_column_error
from distill.data.sources.files import find_format, is_compressed, open_bytes, read_utf8
from distill.data.sources.json_rows import has_object_per_line, iterate_jsonl
from distill.data.sources.separated import count_separated_rows, iterate_separated
from distill.data.sources.tables import (
    describe_row_group,
    find_split_files,
    open_parquet,
    read_splits,
    strip_names,
)
from distill.data.sources.text_column import iterate_cells
from distill.data.sources.text_files import find_text_files, read_texts
from distill.errors import InputError

LARGE = 64 << 20  # bytes of a split's files from which on its texts are read one after another
ROWS_AT_ONCE = 8192
SEPARATED = (".csv", ".tsv")
OBJECTS = (".jsonl", ".json")


class LargeText(Protocol):
    """The documents of a split of LARGE bytes or more, which are read one after another."""

    def count_rows(self) -> int:
        """Returns the number of documents, those without text included, without parsing them."""

    def iterate(self, column: str | None, where: str) -> Iterator[str]:
        """Yields the documents, also those without a character, from the column `column` of a table.

        `where` names the split in errors.
        """


@dataclass(frozen=True)
class TextFiles:
    """A table in a file, or txt files."""

    files: Sequence[Path]

    def count_rows(self) -> int:
        """Returns the number of rows of the table, or of files."""
        if len(self.files) != 1 or find_format(self.files[0]) == ".txt":
            return len(self.files)
        if find_format(self.files[0]) == ".parquet":
            return int(open_parquet(self.files[0]).metadata.num_rows)
        if find_format(self.files[0]) in SEPARATED:
            return count_separated_rows(self.files[0])
        with open_bytes(self.files[0]) as stream:
            return sum(1 for line in stream if line.strip())

    def iterate(self, column: str | None, where: str) -> Iterator[str]:
        """Yields the documents.

        Raises:
            InputError: A column is requested from txt files.
        """
        yield from _iterate_files(self.files, column, where)


@dataclass(frozen=True)
class HubTable:
    """A split of a hub data set: a table in memory-mapped files of `datasets`."""

    table: pa.Table

    def count_rows(self) -> int:
        """Returns the number of rows."""
        return int(self.table.num_rows)

    def iterate(self, column: str | None, where: str) -> Iterator[str]:
        """Yields the documents."""
        batches = self.table.to_batches(ROWS_AT_ONCE)
        yield from _iterate_column((pa.Table.from_batches([batch]) for batch in batches), column, where)


def find_large_text(path: str, split: str = "train", subset: str | None = None) -> LargeText | None:
    """Returns a split's documents if they are LARGE bytes or more and can be read one after another.

    Those are parquet, csv, tsv and jsonl tables, json files with an object per line, folders of txt files, and hub data
    sets.
    """
    source = Path(path).expanduser()
    texts = find_text_files(path)
    if texts or source.exists():
        files = texts[split] if split in texts else [] if texts else _find_table(source, split)
        return TextFiles(files) if sum(file.stat().st_size for file in files) >= LARGE else None
    table = read_splits(path, subset).get(split)
    return HubTable(table) if table is not None and table.nbytes >= LARGE else None


def stream_texts(
    path: str, column: str | None = None, *, split: str = "train", subset: str | None = None
) -> Iterator[str]:
    """Yields the documents that `read_texts` returns, in the same order.

    Of a large source (see `find_large_text`) only a few thousand exist at a time; any other is read as a whole.

    Raises:
        InputError: As in `read_texts`; for a large source when the text that causes it is reached.
    """
    large = find_large_text(path, split, subset)
    if large is None:
        yield from read_texts(path, column, split=split, subset=subset)
        return
    where, count, has_text = f"data {path!r}, {split}", 0, False
    for text in large.iterate(column, where):
        count += 1
        if text.strip():
            has_text = True
            yield text
    if not has_text:
        raise InputError(f"{where}: expected text, found none in {count} documents: no token would be left")


def _find_table(source: Path, split: str) -> list[Path]:
    file = find_split_files(source).get(split) if source.is_dir() else source if split == "train" else None
    return [file] if file is not None and _is_streamable(file) else []


def _is_streamable(file: Path) -> bool:
    if find_format(file) == ".parquet" and not is_compressed(file):
        # Class ids are replaced by their names, which the whole table's reader does.
        return b"ClassLabel" not in (open_parquet(file).schema_arrow.metadata or {}).get(b"huggingface", b"")
    return find_format(file) in (".jsonl", *SEPARATED) or (find_format(file) == ".json" and has_object_per_line(file))


def _iterate_files(files: Sequence[Path], column: str | None, where: str) -> Iterator[str]:
    """Yields the texts of txt files or of one table, also those without a character."""
    if find_format(files[0]) == ".parquet":
        yield from _iterate_column(_iterate_parquet(files[0], column, where), column, where)
        return
    if find_format(files[0]) in SEPARATED:
        tables = (strip_names(table, f"data {str(files[0])!r}") for table in iterate_separated(files[0], ROWS_AT_ONCE))
        yield from _iterate_column(tables, column, where)
        return
    if find_format(files[0]) in OBJECTS:
        yield from _iterate_column(iterate_jsonl(files[0], ROWS_AT_ONCE), column, where)
        return
    if column is not None:
        raise InputError(f"{where}: expected a table with a column {column!r}, found txt files, which have no columns")
    for file in files:
        yield read_utf8(file)


def _iterate_column(tables: Iterator[pa.Table], column: str | None, where: str) -> Iterator[str]:
    """Yields the texts of a column of adjacent parts of a table, empty for null.

    Rows before the first one that has the column, in a format where rows may lack it, have no text.
    """
    table, is_found = None, False
    for table in tables:
        name = column or find_column(table, ("text",))
        if name is None or name not in table.column_names:
            yield from [""] * table.num_rows
            continue
        is_found = True
        values = table[find_columns(table, DataConfig(text=name), where, labelled=False).text]
        yield from (value or "" for value in iterate_cells(values))
    if not is_found and table is not None:
        if column is None:
            raise missing_column_error("text", ("text",), table, where)
        find_columns(table, DataConfig(text=column), where, labelled=False)  # raises the error for the column


def _iterate_parquet(file: Path, column: str | None, where: str) -> Iterator[pa.Table]:
    """Yields the rows of a parquet file with the column of the texts only, of which a few pages are in memory."""
    opened, first = open_parquet(file), 0
    names = [name.strip() for name in opened.schema_arrow.names]
    empty = opened.schema_arrow.empty_table().rename_columns(names)
    name = column or find_column(empty, ("text",))
    if name is None:
        raise missing_column_error("text", ("text",), empty, where)
    text = find_columns(empty, DataConfig(text=name), where, labelled=False).text
    stored = opened.schema_arrow.names[names.index(text)]
    for group in range(opened.num_row_groups):
        rows = opened.metadata.row_group(group).num_rows
        try:
            for batch in opened.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[stored], use_threads=False):
                batch.validate(full=True)
                yield pa.Table.from_batches([batch]).rename_columns([text])
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"data {str(file)!r}: {describe_row_group(first, rows, group)}: {error}") from error
        first += rows
