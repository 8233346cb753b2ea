"""Readers of tables from a file, a folder or the hub, with errors that name the damaged rows."""

import io
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from distill.data.sources.conll import read_conll
from distill.data.sources.files import COMPRESSED, SPLITS, find_format, find_split_name, is_compressed, open_bytes
from distill.data.sources.json_rows import read_json_rows, read_jsonl
from distill.data.sources.separated import read_csv, read_tsv
from distill.data.sources.text_column import iterate_cells
from distill.errors import InputError

BUFFER_BYTES = 1 << 20  # of a parquet file's column that are read at a time


def read_splits(path: str, subset: str | None = None) -> dict[str, pa.Table]:
    """Reads every existing split, by its standard name: train, validation, test.

    Raises:
        InputError: The file or data set does not exist, a folder has no train split or two files of one split, or a
            file is malformed (names the row).
    """
    source = Path(path).expanduser()
    if source.is_file():
        return {"train": read_table(source)}
    if source.is_dir():
        return {split: read_table(file) for split, file in find_split_files(source).items()}
    if (
        source.is_absolute()
        or path.startswith((".", "~"))
        or find_format(source) in TABLE_READERS
        or is_compressed(source)
    ):
        raise InputError(
            f"data {path!r}: no such file or folder; expected a file ending in {list_extensions()}, or a folder"
        )
    return _read_hub(path, subset)


def list_extensions(*more: str) -> str:
    """Returns the supported file extensions, for a message."""
    return f"{', '.join((*more, *TABLE_READERS))}, each also with {COMPRESSED}"


def find_split_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each split.

    Raises:
        InputError: There is no train file, a split has two files, or a folder has the name of a split's file.
    """
    by_split: dict[str, list[Path]] = {}
    for extension in TABLE_READERS:
        for file in sorted(folder.iterdir()):
            split = find_split_name(file)
            if split and find_format(file) == extension:
                if file.is_dir():
                    raise InputError(f"data {str(file)!r}: expected a file, found a folder: nothing would be read")
                by_split.setdefault(split, []).append(file)
    for split, files in by_split.items():
        check_single(split, files)
    if "train" not in by_split:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise InputError(
            f"data {str(folder)!r}: expected a train file "
            f"({', '.join('train' + s for s in TABLE_READERS)}, each also with "
            f"{COMPRESSED}), found {names}: there would be nothing to train on"
        )
    return {split: files[0] for split, files in by_split.items()}


def check_single(split: str, files: list[Path]) -> None:
    """Checks that a split has only one file.

    Raises:
        InputError: The split has several files.
    """
    if len(files) > 1:
        found = " and ".join(sorted(file.name for file in files))
        raise InputError(
            f"data {str(files[0].parent)!r}: expected one {split} file, found {found}: the data would be "
            "ambiguous; keep one file of each split in the folder, or name one file with --data"
        )


def read_table(file: Path) -> pa.Table:
    """Reads one file with the reader for its extension.

    Raises:
        InputError: The extension is unknown, the file is malformed or empty, or two columns have the same name.
    """
    reader = TABLE_READERS.get(find_format(file))
    if reader is None:
        found = "".join(file.suffixes[-2:]) if is_compressed(file) else file.suffix
        raise InputError(f"data {str(file)!r}: expected an extension among {list_extensions()}, found {found!r}")
    if file.is_file() and file.stat().st_size == 0:
        raise InputError(f"data {str(file)!r}: the file is empty")
    where = f"data {str(file)!r}"
    table = strip_names(_name_classes_of_file(reader(file), where), where)
    if table.num_rows == 0:
        raise InputError(f"data {str(file)!r}: expected rows, found none below the header")
    return table


def strip_names(table: pa.Table, where: str) -> pa.Table:
    """Returns the table with column names stripped of surrounding blanks.

    Raises:
        InputError: Two columns have the same name, ignoring surrounding blanks.
    """
    names = [name.strip() for name in table.column_names]
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        numbers = [str(i) for i, name in enumerate(names, 1) if name == duplicates[0]]
        raise InputError(
            f"{where}: expected columns of different names, found {duplicates[0]!r} as the name of columns "
            f"{' and '.join(numbers)}: the name is ambiguous; rename one of them"
        )
    return table.rename_columns(names).replace_schema_metadata(table.schema.metadata)


def open_parquet(file: Path) -> pa.parquet.ParquetFile:
    """Opens a parquet file, whose pages are read when they are used.

    Raises:
        InputError: The file can't be read, or its footer is damaged.
    """
    with open_bytes(file) as stream:  # Arrow opens an uncompressed file by its path
        source = io.BytesIO(stream.read()) if is_compressed(file) else file
    try:
        return pa.parquet.ParquetFile(source, page_checksum_verification=True, buffer_size=BUFFER_BYTES)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"data {str(file)!r}: not a parquet file, or its footer is damaged: {error}") from error


def describe_row_group(first: int, rows: int, group: int) -> str:
    """Describes the damaged row group of `rows` rows after the first `first` rows of a file."""
    return f"rows {first + 1} to {first + rows} (row group {group}) are damaged"


def _read_parquet(file: Path) -> pa.Table:
    opened = open_parquet(file)
    groups, first = [], 0
    for index in range(opened.num_row_groups):
        rows = opened.metadata.row_group(index).num_rows
        try:
            groups.append(opened.read_row_group(index))
            groups[-1].validate(full=True)  # otherwise invalid UTF-8 fails later, without the file's name
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"data {str(file)!r}: {describe_row_group(first, rows, index)}: {error}") from error
        first += rows
    return pa.concat_tables(groups) if groups else opened.schema_arrow.empty_table()


def _name_classes_of_file(table: pa.Table, where: str) -> pa.Table:
    """Replaces class ids by their names, if the file's own metadata contains them as in files of the hub.

    Raises:
        InputError: The metadata can't be read.
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
    return _name_classes(table, features, where)


def _read_hub(name: str, subset: str | None) -> dict[str, pa.Table]:
    """Reads the splits of a hub data set; class ids are replaced by their names.

    Raises:
        InputError: The data set does not exist or has no train split, or two splits have the same meaning.
    """
    loaded = load_hub(name, subset)
    known = [str(split) for split in loaded if str(split) in SPLITS]
    for split, count in Counter(SPLITS[each] for each in known).items():
        if count > 1:
            found = " and ".join(each for each in known if SPLITS[each] == split)
            raise InputError(f"data {name!r}: expected one {split} split, found {found}: the split would be ambiguous")
    if "train" not in known:
        raise InputError(f"data {name!r}: expected a train split, found {', '.join(map(str, loaded))}")
    splits = {}
    for split in known:
        where, rows = f"data {name!r}, {split}", loaded[split]
        table = rows.with_format("arrow")[:]
        splits[SPLITS[split]] = strip_names(_name_classes(table, rows.features, where), where)
    return splits


def load_hub(name: str, subset: str | None) -> Mapping[str, Any]:
    """Loads the splits of the data set, from the hub or its local copy, once in a process."""
    import datasets

    try:
        return _load_once(name, subset, str(datasets.config.HF_DATASETS_CACHE))
    except Exception as error:  # the hub client raises about twenty exception types
        raise InputError(
            f"data {name!r}: no such file or folder here, and no data set of that name could be loaded from the hub: "
            f"{error}"
        ) from error


@lru_cache(maxsize=1)
def _load_once(name: str, subset: str | None, cache: str) -> Mapping[str, Any]:
    """Returns the splits, which are memory-mapped files in the folder `cache` of `datasets`."""
    import datasets

    splits: Mapping[str, Any] = datasets.load_dataset(name, subset)
    return splits


def _name_classes(table: pa.Table, features: Mapping[str, Any], where: str) -> pa.Table:
    """Replaces class ids by their names, also in lists (several labels per text, or a tag per word).

    Raises:
        InputError: An id has no name.
    """
    for column, feature in features.items():
        kind = _find_class_type(feature)
        if kind is None or column not in table.column_names:
            continue
        chunks = [_look_up_names(chunk, feature) for chunk in table[column].chunks]
        if any(chunk is None for chunk in chunks):
            _check_class_ids(table[column], feature, f"column {column!r}", where)
        table = table.set_column(table.schema.get_field_index(column), column, pa.chunked_array(chunks, kind))
    return table


def _look_up_names(ids: pa.Array, feature: Any) -> pa.Array | None:
    """Returns the names of class ids, or lists of names; null for a missing class, None if an id has no name."""
    if not hasattr(feature, "names"):
        names = _look_up_names(ids.flatten(), feature.feature)
        if names is None:
            return None
        lengths = pa.compute.fill_null(pa.compute.list_value_length(ids), 0).to_numpy()
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, names, mask=ids.is_null())
    known = pa.compute.if_else(pa.compute.less(ids, 0), None, ids)
    if pa.compute.any(pa.compute.greater_equal(known, len(feature.names))).as_py():
        return None
    return pa.array(feature.names, pa.string()).take(known)


def _check_class_ids(cells: pa.ChunkedArray, feature: Any, column: str, where: str) -> None:
    """Checks that each class id has a name.

    Raises:
        InputError: An id has no name; the message names the first such row.
    """
    for row, cell in enumerate(iterate_cells(cells), 1):
        try:
            _look_up_class_names(cell, feature)
        except ValueError as error:
            raise InputError(
                f"{where}: row {row}, {column}: expected the number of a class that the data set names, "
                f"found {str(cell)[:60]}: it has no name"
            ) from error


def _find_class_type(feature: object) -> pa.DataType | None:
    """Returns the Arrow type of the names in a column of classes or of lists of classes; None for other columns."""
    from datasets import ClassLabel, LargeList, List

    if isinstance(feature, (List, LargeList)):
        inner = _find_class_type(feature.feature)
        return None if inner is None else pa.list_(inner)
    return pa.string() if isinstance(feature, ClassLabel) else None


def _look_up_class_names(cell: Any, feature: Any) -> Any:
    """Returns the name of a class, or the names of a list of classes; None for a missing class."""
    if isinstance(cell, list):
        return [_look_up_class_names(each, feature.feature) for each in cell]
    return None if cell is None or cell < 0 else feature.int2str(cell)


TABLE_READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".parquet": _read_parquet,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".json": read_json_rows,
    ".jsonl": read_jsonl,
    ".conll": read_conll,
}
