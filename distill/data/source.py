"""Reads a table of text from a file, a folder or the hub; every broken row is named."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from distill.data.columns import MARK
from distill.data.conll import read_conll
from distill.data.quoting import mark_unquoted
from distill.errors import InputError

SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}
SPLITS |= {"test": "test"}
NESTED = (list, dict)


def read_splits(path: str, subset: str | None = None) -> dict[str, pa.Table]:
    """Reads every split there is, by its own name: train, validation, test.

    Raises:
        InputError: No such file or data set, no train split in a folder, or a file that is broken (names the row).
    """
    place = Path(path).expanduser()
    if place.is_file():
        return {"train": read_table(place)}
    if place.is_dir():
        return {split: read_table(file) for split, file in split_files(place).items()}
    if place.is_absolute() or path.startswith((".", "~")) or place.suffix in READERS:
        raise InputError(
            f"data {path!r}: no such file or folder; expected a csv, tsv, jsonl or parquet file or a folder"
        )
    return read_hub(path, subset)


def split_files(folder: Path) -> dict[str, Path]:
    """Finds one file a split; of several formats of the same split, parquet wins."""
    found: dict[str, Path] = {}
    for suffix in READERS:
        for file in sorted(folder.glob(f"*{suffix}")):
            split = SPLITS.get(file.stem.lower())
            if split:
                found.setdefault(split, file)
    if "train" not in found:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise InputError(
            f"data {str(folder)!r}: expected a train file ({', '.join('train' + s for s in READERS)}), found {names}: "
            "there would be nothing to train on"
        )
    return found


def read_table(file: Path) -> pa.Table:
    """Reads one file; the reader follows the file's ending."""
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise InputError(f"data {str(file)!r}: expected an ending among {', '.join(READERS)}, found {file.suffix!r}")
    if not file.is_file():
        raise InputError(f"data {str(file)!r}: no such file")
    if file.stat().st_size == 0:
        raise InputError(f"data {str(file)!r}: the file is empty")
    table = reader(file)
    if table.num_rows == 0:
        raise InputError(f"data {str(file)!r}: expected rows, found none below the header")
    return table


def read_csv(file: Path, delimiter: str = ",") -> pa.Table:
    parse = pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    one = pa.csv.ReadOptions(use_threads=False)  # with several threads Arrow can't tell the number of a broken row
    try:
        with pa.csv.open_csv(file, one, parse) as opened:
            names = opened.schema.names
        # As text, whatever the values look like: "007" is a label, not the number 7.
        convert = pa.csv.ConvertOptions(column_types={name: pa.string() for name in names})
        table = pa.csv.read_csv(file, one, parse, convert)

        def with_nulls(columns: list[str], words: list[str]) -> pa.Table:
            nulls = pa.csv.ConvertOptions(
                column_types={name: pa.string() for name in columns},
                include_columns=columns,
                null_values=words,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            )
            return pa.csv.read_csv(file, one, parse, nulls)

        table = mark_unquoted(table, with_nulls)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise InputError(f"data {str(file)!r}: not a well-formed csv file in UTF-8: {error}") from error
    check_quotes(file, table, delimiter)
    return table


def read_tsv(file: Path) -> pa.Table:
    return read_csv(file, delimiter="\t")


def check_quotes(file: Path, table: pa.Table, delimiter: str) -> None:
    """Arrow reads on over the ends of lines where a quote isn't closed, and takes what follows for one cell.

    Raises:
        InputError: There is such a quote.
    """
    if not any(pa.compute.any(pa.compute.match_substring(column, "\n")).as_py() for column in table.columns):
        return
    csv.field_size_limit(1 << 31)
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            for _ in rows:
                pass
        except csv.Error as error:
            raise InputError(
                f"data {str(file)!r}: up to line {rows.line_num} a quote before a cell isn't closed at its end "
                f"({error}): all rows in between would be one cell; quote cells whole, and write quotes in them twice"
            ) from error


def read_jsonl(file: Path) -> pa.Table:
    rows: list[dict] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if b"\\u" in line:  # an escape can name half a character, which is JSON but no text
                    json.dumps(row, ensure_ascii=False).encode()
            except ValueError as error:
                raise InputError(f"data {str(file)!r}: row {number} is not JSON in UTF-8: {error}") from error
            if not isinstance(row, dict):
                raise InputError(f"data {str(file)!r}: row {number}: expected an object, found {type(row).__name__}")
            rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    marks = [{MARK: b""} if any(isinstance(row.get(name), NESTED) for row in rows) else {} for name in names]
    fields = [pa.field(name, pa.string(), metadata=mark) for name, mark in zip(names, marks, strict=True)]
    return pa.table([[as_text(row.get(name)) for row in rows] for name in names], schema=pa.schema(fields))


def read_parquet(file: Path) -> pa.Table:
    try:
        opened = pa.parquet.ParquetFile(file, page_checksum_verification=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"data {str(file)!r}: not a parquet file, or its footer is damaged: {error}") from error
    groups, first = [], 0
    for index in range(opened.num_row_groups):
        rows = opened.metadata.row_group(index).num_rows
        try:
            groups.append(opened.read_row_group(index))
            groups[-1].validate(full=True)  # without it text that is no UTF-8 fails later, far from its file
        except (pa.ArrowException, OSError) as error:
            where = f"rows {first + 1} to {first + rows} (row group {index})"
            raise InputError(f"data {str(file)!r}: {where} are damaged: {error}") from error
        first += rows
    table = pa.concat_tables(groups) if groups else opened.schema_arrow.empty_table()
    if b"ClassLabel" not in (table.schema.metadata or {}).get(b"huggingface", b""):
        return table
    import datasets

    return named_classes(table, datasets.Features.from_arrow_schema(table.schema))


def as_text(value: object) -> str | None:
    """A JSON value as the text or label that a person would read."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        return None  # Python writes it so, and means that there is no value
    return json.dumps(value, ensure_ascii=False)


def read_hub(name: str, subset: str | None) -> dict[str, pa.Table]:
    """Loads a hub data set; class numbers are replaced by their names."""
    import datasets

    try:
        loaded = datasets.load_dataset(name, subset)
    except Exception as error:  # the hub client raises some twenty kinds
        raise InputError(
            f"data {name!r}: no such file or folder here, and the hub gave no data set of that name: {error}"
        ) from error
    splits = {}
    for split, rows in loaded.items():
        if str(split) in SPLITS:
            splits[SPLITS[str(split)]] = named_classes(rows.with_format("arrow")[:], rows.features)
    if "train" not in splits:
        raise InputError(f"data {name!r}: expected a train split, found {', '.join(map(str, loaded))}")
    return splits


def named_classes(table: pa.Table, features: Mapping[str, Any]) -> pa.Table:
    """The table with names for the numbers of classes, also in lists: several labels a text, a tag a word."""
    for column, feature in features.items():
        kind = class_type(feature)
        if kind is not None:
            names = pa.array([class_names(cell, feature) for cell in table[column].to_pylist()], kind)
            table = table.set_column(table.schema.get_field_index(column), column, names)
    return table


def class_type(feature: Any) -> pa.DataType | None:
    """What the names of a column of classes, or of lists of them, are; None of any other."""
    from datasets import ClassLabel, LargeList, List

    if isinstance(feature, (List, LargeList)):
        inner = class_type(feature.feature)
        return None if inner is None else pa.list_(inner)
    return pa.string() if isinstance(feature, ClassLabel) else None


def class_names(cell: Any, feature: Any) -> Any:
    """The name of a class, of each in a list; None where there is none."""
    if isinstance(cell, list):
        return [class_names(each, feature.feature) for each in cell]
    return None if cell is None or cell < 0 else feature.int2str(cell)


READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".jsonl": read_jsonl,
    ".conll": read_conll,
}
