"""Readers of tables with a separator between columns: csv and tsv."""

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv

from distill.data.sources.files import find_format, open_bytes
from distill.data.sources.quoting import mark_unquoted
from distill.errors import InputError

SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
SAMPLE = 200  # rows from which the separator is inferred
_SAMPLE_BYTES = 4 << 20  # at the start of a file that is read in parts, from which those rows are taken
MAX_BLOCK = 2**31 - 1  # of Arrow's parser, in bytes
_SHOWN = 300  # characters of Arrow's message, which includes the whole malformed row

csv.field_size_limit(sys.maxsize)  # a cell may contain a whole book


def read_csv(file: Path) -> pa.Table:
    """Reads a csv file, whose separator is inferred.

    Raises:
        InputError: The file can't be read or is malformed (names the row).
    """
    content = read_content(file)
    return _parse_whole(file, content, find_separator(content))


def read_tsv(file: Path) -> pa.Table:
    """Reads a file with tabs between columns.

    Raises:
        InputError: The file can't be read or is malformed (names the row).
    """
    return _parse_whole(file, read_content(file), "\t")


def iterate_separated(file: Path, rows: int) -> Iterator[pa.Table]:
    """Yields the table that `read_csv` or `read_tsv` returns in parts of at most `rows` rows.

    Raises:
        InputError: As in these, when the row is reached.
    """
    header, skipped = b"", 0
    separator = _find_separator_of_file(file)
    for part, count in _iterate_parts(file, separator, rows):
        if header:
            yield _parse_table(file, header + part, separator, skipped)
            skipped += count
        else:
            header = part


def count_separated_rows(file: Path) -> int:
    """Returns the number of rows below the header.

    Raises:
        InputError: The file can't be read, or a quote isn't closed at the end of its cell.
    """
    return max(0, sum(count for _, count in _iterate_parts(file, _find_separator_of_file(file), SAMPLE)) - 1)


def _find_separator_of_file(file: Path) -> str:
    if find_format(file) == ".tsv":
        return "\t"
    with open_bytes(file) as stream:
        return find_separator(stream.read(_SAMPLE_BYTES))


def _iterate_parts(file: Path, separator: str, rows: int) -> Iterator[tuple[bytes, int]]:
    """Yields the header, then the bytes of at most `rows` rows and their number."""
    part: list[str] = []
    count, limit = 0, 1
    with open_bytes(file) as stream:
        for row in _iterate_rows(file, stream, separator, part):
            count += bool(row)
            if count == limit:
                yield _encode(part), count
                part.clear()
                count, limit = 0, rows
    if count:
        yield _encode(part), count


def _iterate_rows(file: Path, stream: BinaryIO, separator: str, lines: list[str] | None = None) -> Iterator[list[str]]:
    """Yields the cells of each row, none for an empty line, and appends the lines that it took to `lines`.

    Arrow doesn't report unclosed quotes: it reads on across line breaks after one, and drops one closed too early.

    Raises:
        InputError: A quote isn't closed at the end of its cell.
    """
    opened = _open_lines(stream)
    taken = opened if lines is None else _append_to(lines, opened)
    rows = csv.reader(taken, delimiter=separator, strict=True)
    first = 1
    try:
        for row in rows:
            yield row
            first = rows.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"data {str(file)!r}: line {first}: a quote before a cell isn't closed at its end ({error}): all rows up "
            f"to line {rows.line_num} would be one cell, or quotes would be lost; quote entire cells, and double the "
            "quotes in them"
        ) from error


def _append_to(lines: list[str], stream: Iterable[str]) -> Iterator[str]:
    for line in stream:
        lines.append(line)
        yield line


def _encode(lines: Sequence[str]) -> bytes:
    return "".join(lines).encode("utf-8", "surrogateescape")


def read_content(file: Path) -> bytes:
    """Returns the content of a file, decompressed if its name ends in `.gz`."""
    with open_bytes(file) as stream:
        return stream.read()


def _parse_whole(file: Path, content: bytes, separator: str) -> pa.Table:
    """Parses a whole file, and checks its quotes; those of a part are checked when the file is cut into parts."""
    table = _parse_table(file, content, separator)
    if b'"' in content:
        _check_quotes(file, content, separator)
    return table


def _parse_table(file: Path, content: bytes, separator: str, skipped: int = 0) -> pa.Table:
    """Parses the content of a file as a table of text, without inferring types: "007" is a label, not the number 7.

    Empty lines are skipped, and columns without a name and values are dropped. `skipped` rows precede the content's
    first one in the file.

    Raises:
        InputError: A row has more or fewer cells than the header, a quote isn't closed, or the content is not UTF-8
            (names the row).
    """
    parse = pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    # One block, as cells must not exceed a block; one thread, so that Arrow reports the number of a malformed row.
    whole = pa.csv.ReadOptions(use_threads=False, block_size=min(len(content) + 1, MAX_BLOCK))

    def read(**options: Any) -> pa.Table:
        return pa.csv.read_csv(pa.BufferReader(content), whole, parse, pa.csv.ConvertOptions(**options))

    try:
        with pa.csv.open_csv(pa.BufferReader(content), whole, parse) as opened:
            names = opened.schema.names
        table = read(column_types=dict.fromkeys(names, pa.string()))
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        message = " ".join(str(error)[:_SHOWN].split("\n"))
        message = re.sub(r"(?<=Row #)\d+", lambda number: str(int(number[0]) + skipped), message, count=1)
        consequence = _explain_parse_error(message, separator)
        raise InputError(f"data {str(file)!r}: not a well-formed csv file in UTF-8: {message}{consequence}") from error
    _check_header(file, names)
    nulls = {"strings_can_be_null": True, "quoted_strings_can_be_null": False}
    table = mark_unquoted(
        table,
        lambda columns, null_texts: read(
            column_types=dict.fromkeys(columns, pa.string()), include_columns=columns, null_values=null_texts, **nulls
        ),
    )
    used = [i for i, name in enumerate(table.column_names) if name.strip() or any(table.column(i).to_pylist())]
    return table.select(used)


def _explain_parse_error(message: str, separator: str) -> str:
    """Returns the consequence of Arrow's error and a remedy, for the message."""
    if "columns, got" in message:
        return f": the column of each cell is unknown; quote cells that contain {SEPARATORS[separator]}"
    if "utf" in message.lower():
        return ": the model would learn wrong characters; save the file as UTF-8"
    return ""


def _check_header(file: Path, names: Sequence[str]) -> None:
    """Checks that quotes in the header were parsed as quotes.

    Raises:
        InputError: A name keeps its quotes because a blank precedes them.
    """
    quoted = next((name for name in names if name.strip().startswith('"')), None)
    if quoted is not None:
        raise InputError(
            f"data {str(file)!r}: line 1: expected quotes right after a separator, found a blank before "
            f"{quoted.strip()}: quotes would be part of the name and of the cells; leave the blanks out"
        )


def _check_quotes(file: Path, content: bytes, separator: str) -> None:
    """Checks that quotes are closed at the end of their cells; see `_iterate_rows`."""
    for _ in _iterate_rows(file, io.BytesIO(content), separator):
        pass


def find_separator(content: bytes) -> str:
    """Infers the separator: the one that splits most of the first rows into as many cells as the header.

    Ties go to the first of SEPARATORS; a comma is assumed if no separator fits half of the rows.
    """
    shares = {separator: _measure_share_like_header(content, separator) for separator in SEPARATORS}
    best = max(shares, key=lambda separator: shares[separator])
    return best if shares[best] >= 0.5 else ","


def _measure_share_like_header(content: bytes, separator: str) -> float:
    """Returns the share of the first rows with as many columns as the header, 0 if the header has only one."""
    rows = filter(None, csv.reader(_open_lines(io.BytesIO(content)), delimiter=separator))
    widths = [len(cells) for cells in islice(rows, SAMPLE + 1)]
    if not widths or widths[0] < 2:
        return 0.0
    return widths[1:].count(widths[0]) / len(widths[1:]) if widths[1:] else 1.0


def _open_lines(stream: BinaryIO) -> io.TextIOWrapper:
    """Opens the lines with their line breaks, as `csv` requires; bytes that are not UTF-8 stay, for Arrow's message."""
    return io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
