"""Readers of tables in JSON: an object per line, or a list of objects."""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from distill.data.sources.columns import MARK
from distill.data.sources.files import open_bytes, read_utf8
from distill.data.sources.text_column import BLOCK_ROWS
from distill.errors import InputError

NESTED = (list, dict)
_LONGEST_LINE, _FIRST_LINES = 1 << 20, 16  # bytes and lines that are examined for an object per line
ROWS, COLUMNS = "data", "columns"  # keys in files written by pandas or the hub


def read_jsonl(file: Path) -> pa.Table:
    """Reads an object per line; empty lines are skipped.

    Raises:
        InputError: A line is not JSON, or not an object (names the row).
    """
    rows = _TableBuilder()
    for row in _iterate_objects(file):
        rows.add(row)
    return rows.build()


def iterate_jsonl(file: Path, rows: int) -> Iterator[pa.Table]:
    """Yields the table that `read_jsonl` returns in parts of at most `rows` rows, each with the keys of its own rows.

    Raises:
        InputError: As in `read_jsonl`, when the row is reached.
    """
    objects = _iterate_objects(file)
    while part := list(islice(objects, rows)):
        table = _TableBuilder()
        for row in part:
            table.add(row)
        yield table.build()


def has_object_per_line(file: Path) -> bool:
    """Returns whether the first two lines with content are objects, as in files of an object per line."""
    with open_bytes(file) as stream:
        lines = (stream.readline(_LONGEST_LINE) for _ in range(_FIRST_LINES))
        return [_is_object(line) for line in lines if line.strip()][:2] == [True, True]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(_parse_json(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _iterate_objects(file: Path) -> Iterator[dict[str, Any]]:
    with open_bytes(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = _parse_json(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise InputError(f"data {str(file)!r}: row {number} is not JSON in UTF-8: {error}") from error
            yield _check_object(row, f"data {str(file)!r}: row {number}")


def read_json_rows(file: Path) -> pa.Table:
    """Reads a list of objects, an object with such a list under `data`, or an object per line, common for .json.

    Raises:
        InputError: The file is not JSON, contains no rows, or a row is not an object (names the row).
    """
    where = f"data {str(file)!r}"
    try:
        content = _parse_json(read_utf8(file))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return read_jsonl(file)
        raise InputError(f"{where}: not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    rows = _TableBuilder()
    for i, row in enumerate(_find_rows(content, where), 1):
        rows.add(_check_object(row, f"{where}: row {i}"))
    return rows.build()


def _find_rows(content: object, where: str) -> list[Any]:
    """Returns the rows of a JSON document.

    Raises:
        InputError: The document contains no rows, or other rows under further keys.
    """
    if isinstance(content, list):
        return content
    if isinstance(content, dict) and isinstance(content.get(ROWS), list):
        rows: list[Any] = content[ROWS]
        names = content.get(COLUMNS)
        others = [key for key, value in content.items() if key not in (ROWS, COLUMNS, "index") and _are_rows(value)]
        if others:
            raise InputError(f"{where}: expected the rows under {ROWS!r} alone, found more under {others[0]!r}")
        if isinstance(names, list) and all(isinstance(row, list) and len(row) == len(names) for row in rows):
            _check_names(names, where)
            return [dict(zip(names, row, strict=True)) for row in rows]
        return rows
    keys = ", ".join(map(repr, [*content][:5])) if isinstance(content, dict) else ""
    found = f"an object with {keys}" if keys else repr(content)[:60]
    raise InputError(
        f"{where}: expected a list of objects, or one under {ROWS!r}, found {found}: the rows can't be identified"
    )


def _check_names(names: Sequence[object], where: str) -> None:
    """Checks the names of columns.

    Raises:
        InputError: A name is not text, or occurs twice.
    """
    wrong = next((name for name in names if not isinstance(name, str) or names.count(name) > 1), None)
    if wrong is not None:
        raise InputError(
            f"{where}: expected names under {COLUMNS!r}, each once, found {str(wrong)[:60]!r}: columns would be "
            "ambiguous"
        )


def _are_rows(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(each, NESTED) for each in value)


def _parse_json(text: str) -> Any:
    """Parses strict JSON.

    Raises:
        ValueError: The text is not JSON, an object has a key twice, or a string can't be encoded in UTF-8.
    """
    content = json.loads(text, object_pairs_hook=_build_object)
    if "\\u" in text:  # an escape can be a lone surrogate, which is valid JSON but not text
        json.dumps(content, ensure_ascii=False).encode()
    return content


def _build_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a dict.

    Raises:
        ValueError: A key occurs twice.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {duplicate!r} occurs twice in one object: one of its values would be lost")
    return content


def _check_object(row: object, where: str) -> dict[str, Any]:
    """Returns the row.

    Raises:
        InputError: It is not an object.
    """
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, found {type(row).__name__}")
    return row


class _TableBuilder:
    """Builds a table of objects, of which only a block exists as Python objects at a time.

    All values become text; columns with lists or objects are marked in their metadata.
    """

    def __init__(self) -> None:
        self.pending: list[dict[str, Any]] = []
        self.blocks: list[tuple[int, dict[str, pa.Array]]] = []  # number of rows, columns
        self.nested: dict[str, bool] = {}  # names in the order of their first row

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row."""
        self.pending.append(row)
        if len(self.pending) == BLOCK_ROWS:
            self.convert()

    def convert(self) -> None:
        """Converts the pending rows to Arrow."""
        for row in self.pending:
            for name, value in row.items():
                self.nested[name] = self.nested.get(name, False) or isinstance(value, NESTED)
        columns = {
            name: pa.array([_to_text(row.get(name)) for row in self.pending], pa.string()) for name in self.nested
        }
        self.blocks.append((len(self.pending), columns))
        self.pending = []

    def build(self) -> pa.Table:
        """Returns the table; a key that a row lacks is null."""
        self.convert()
        columns = [
            pa.chunked_array([block.get(name, pa.nulls(count, pa.string())) for count, block in self.blocks])
            for name in self.nested
        ]
        fields = [
            pa.field(name, pa.string(), metadata={MARK: b""} if nested else {}) for name, nested in self.nested.items()
        ]
        return pa.table(columns, schema=pa.schema(fields))


def _to_text(value: object) -> str | None:
    """Returns a JSON value as text or as the name of a label; None for null and NaN."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        return None  # Python and pandas write missing values as NaN
    return json.dumps(value, ensure_ascii=False)
