"""Reads a table of text from a file, a folder or the hub; every broken row is named."""

import io
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from distill.data.sources.conll import read_conll
from distill.data.sources.files import COMPRESSED, SPLITS, format_of, is_compressed, open_bytes, split_of
from distill.data.sources.json_rows import read_json, read_jsonl
from distill.data.sources.separated import read_csv, read_tsv
from distill.errors import InputError


def read_splits(path: str, subset: str | None = None) -> dict[str, pa.Table]:
    """Reads every split there is, by its own name: train, validation, test.

    Raises:
        InputError: No such file or data set, no train split in a folder, two files of one split, or a file that is
            broken (names the row).
    """
    place = Path(path).expanduser()
    if place.is_file():
        return {"train": read_table(place)}
    if place.is_dir():
        return {split: read_table(file) for split, file in split_files(place).items()}
    if place.is_absolute() or path.startswith((".", "~")) or format_of(place) in READERS or is_compressed(place):
        raise InputError(f"data {path!r}: no such file or folder; expected a file ending in {endings()}, or a folder")
    return read_hub(path, subset)


def endings(*more: str) -> str:
    """The endings of files that are read, for a message."""
    return f"{', '.join((*more, *READERS))}, each also with {COMPRESSED}"


def split_files(folder: Path) -> dict[str, Path]:
    """Finds the one file of each split.

    Raises:
        InputError: No train file, or two files of one split.
    """
    found: dict[str, list[Path]] = {}
    for ending in READERS:
        for file in sorted(folder.iterdir()):
            split = split_of(file)
            if split and format_of(file) == ending:
                found.setdefault(split, []).append(file)
    for split, files in found.items():
        check_single(split, files)
    if "train" not in found:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise InputError(
            f"data {str(folder)!r}: expected a train file ({', '.join('train' + s for s in READERS)}, each also with "
            f"{COMPRESSED}), found {names}: there would be nothing to train on"
        )
    return {split: files[0] for split, files in found.items()}


def check_single(split: str, files: list[Path]) -> None:
    """
    Raises:
        InputError: There are several files of this split.
    """
    if len(files) > 1:
        found = " and ".join(sorted(file.name for file in files))
        raise InputError(
            f"data {str(files[0].parent)!r}: expected one {split} file, found {found}: it can't be told which one "
            "holds the data; keep one file of each split in the folder, or name one file with --data"
        )


def read_table(file: Path) -> pa.Table:
    """Reads one file; the reader follows the file's ending."""
    reader = READERS.get(format_of(file))
    if reader is None:
        found = "".join(file.suffixes[-2:]) if is_compressed(file) else file.suffix
        raise InputError(f"data {str(file)!r}: expected an ending among {endings()}, found {found!r}")
    if file.is_file() and file.stat().st_size == 0:
        raise InputError(f"data {str(file)!r}: the file is empty")
    table, where = reader(file), f"data {str(file)!r}"
    check_names(table, where)
    table = stripped(named_classes_of_file(table, where))
    if table.num_rows == 0:
        raise InputError(f"data {str(file)!r}: expected rows, found none below the header")
    return table


def check_names(table: pa.Table, where: str) -> None:
    """
    Raises:
        InputError: Two columns of one name, whatever blanks are around it.
    """
    names = [name.strip() for name in table.column_names]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        places = [str(i) for i, name in enumerate(names, 1) if name == twice[0]]
        raise InputError(
            f"{where}: expected columns of different names, found {twice[0]!r} as the name of columns "
            f"{' and '.join(places)}: it can't be told which one is meant; rename one of them"
        )


def stripped(table: pa.Table) -> pa.Table:
    """The table with the names of its columns without blanks around them."""
    names = [name.strip() for name in table.column_names]
    return table.rename_columns(names).replace_schema_metadata(table.schema.metadata)


def read_parquet(file: Path) -> pa.Table:
    with open_bytes(file) as stream:  # Arrow maps a plain file into memory by its name
        source = io.BytesIO(stream.read()) if is_compressed(file) else file
    try:
        opened = pa.parquet.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
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
    return pa.concat_tables(groups) if groups else opened.schema_arrow.empty_table()


def named_classes_of_file(table: pa.Table, where: str) -> pa.Table:
    """The table with names for the numbers of classes, where the file itself describes them as the hub's files do.

    Raises:
        InputError: It does so in a way that can't be read.
    """
    if b"ClassLabel" not in (table.schema.metadata or {}).get(b"huggingface", b""):
        return table
    import datasets

    try:
        features = datasets.Features.from_arrow_schema(table.schema)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{where}: expected the names of classes in the file's own description, found one that can't be read "
            f"({error}): the numbers of classes would be taken for their names"
        ) from error
    return named_classes(table, features, where)


def read_hub(name: str, subset: str | None) -> dict[str, pa.Table]:
    """Reads the splits of a hub data set; class numbers are replaced by their names.

    Raises:
        InputError: No such data set, no train split in it, or two splits of one kind.
    """
    loaded = load_hub(name, subset)
    known = [str(split) for split in loaded if str(split) in SPLITS]
    for split, count in Counter(SPLITS[each] for each in known).items():
        if count > 1:
            found = " and ".join(each for each in known if SPLITS[each] == split)
            raise InputError(
                f"data {name!r}: expected one {split} split, found {found}: it can't be told which one is meant"
            )
    if "train" not in known:
        raise InputError(f"data {name!r}: expected a train split, found {', '.join(map(str, loaded))}")
    splits = {}
    for split in known:
        where, rows = f"data {name!r}, {split}", loaded[split]
        table = rows.with_format("arrow")[:]
        check_names(table, where)
        splits[SPLITS[split]] = stripped(named_classes(table, rows.features, where))
    return splits


def load_hub(name: str, subset: str | None) -> Mapping[str, Any]:
    """The data set of this name by its splits, from the hub or its local copy."""
    import datasets

    try:
        return datasets.load_dataset(name, subset)
    except Exception as error:  # the hub client raises some twenty kinds
        raise InputError(
            f"data {name!r}: no such file or folder here, and the hub gave no data set of that name: {error}"
        ) from error


def named_classes(table: pa.Table, features: Mapping[str, Any], where: str) -> pa.Table:
    """The table with names for the numbers of classes, also in lists: several labels a text, a tag a word.

    Raises:
        InputError: A number without a name.
    """
    for column, feature in features.items():
        kind = class_type(feature)
        if kind is None or column not in table.column_names:
            continue
        names = []
        for row, cell in enumerate(table[column].to_pylist(), 1):
            try:
                names.append(class_names(cell, feature))
            except ValueError as error:
                raise InputError(
                    f"{where}: row {row}, column {column!r}: expected the number of a class that the data set names, "
                    f"found {str(cell)[:60]}: it has no name"
                ) from error
        table = table.set_column(table.schema.get_field_index(column), column, pa.array(names, kind))
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
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".conll": read_conll,
}
