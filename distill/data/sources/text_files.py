"""Readers of plain text: documents in txt files, or in a column of a table."""

from pathlib import Path

import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.columns import find_column, find_columns, missing_column_error
from distill.data.sources.files import COMPRESSED, find_format, find_split_name, read_utf8
from distill.data.sources.tables import TABLE_READERS, check_single, find_split_files, list_extensions, read_splits
from distill.data.sources.text_column import iterate_cells
from distill.errors import InputError

_TEXT = ".txt"


def read_texts(path: str, column: str | None = None, *, split: str = "train", subset: str | None = None) -> list[str]:
    """Reads the documents of one split, in the order of the source; documents without text are left out.

    Args:
        path: A txt file (one document, train), a folder of txt files without tables (one document per file, sorted,
            including subfolders), or any source that `read_splits` reads: a table file, a folder with a train table, a
            hub data set. If all files and subfolders with txt files are named after splits, the folder is read split by
            split; otherwise all of it is train.
        column: Column of a table that contains the text; `text` if not set.
        split: train, validation or test.
        subset: Name of the hub data set's configuration.

    Raises:
        InputError: There is nothing at `path`, a file is malformed or empty (names the file), the split or column does
            not exist, a column does not contain text, a column is requested from txt files, or the train files in a
            folder are ambiguous.
    """
    if not path:
        raise InputError(
            "data: no path is set: there would be nothing to read; name a file, a folder or a hub data set"
        )
    files = find_text_files(path)
    splits = files or read_splits(path, subset)
    if split not in splits:
        raise InputError(f"data {path!r}: expected a split {split!r}, found {', '.join(splits)}: nothing would be read")
    where = f"data {path!r}, {split}"
    if not files:
        texts = _read_column(splits[split], column, where)
    elif column is None:
        texts = [read_utf8(file) for file in files[split]]
    else:
        raise InputError(f"{where}: expected a table with a column {column!r}, found txt files, which have no columns")
    documents = [text for text in texts if text.strip()]
    if not documents:
        raise InputError(f"{where}: expected text, found none in {len(texts)} documents: no token would be left")
    return documents


def split_names(path: str, subset: str | None = None) -> tuple[str, ...]:
    """Returns the splits that `read_texts` finds at `path`; of a file or folder, its content isn't read."""
    source = Path(path).expanduser()
    if texts := find_text_files(path):
        return tuple(texts)
    return (
        ("train",)
        if source.is_file()
        else tuple(find_split_files(source) if source.is_dir() else read_splits(path, subset))
    )


def find_text_files(path: str) -> dict[str, list[Path]]:
    """Returns the txt files of each split; empty if `path` is to be read as a table or from the hub."""
    source = Path(path).expanduser()
    if source.is_dir():
        return _group_by_split(source)
    if find_format(source) == _TEXT:
        if not source.is_file():
            raise InputError(f"data {path!r}: expected a txt file, found no such file: nothing would be read")
        return {"train": [source]}
    if source.is_file() and find_format(source) not in TABLE_READERS:
        raise InputError(
            f"data {path!r}: expected an extension among {list_extensions(_TEXT)}, found {source.suffix!r}: the format "
            "of the file is unknown"
        )
    return {}


def _group_by_split(folder: Path) -> dict[str, list[Path]]:
    """Groups a folder's txt files by split, by the name of the top-level file or subfolder."""
    if any(_is_table(file) for file in folder.iterdir()):
        return {}  # next to a table, a txt file is more likely a readme than the text
    files = [file for file in folder.rglob("*") if find_format(file) == _TEXT and file.is_file()]
    files.sort(key=lambda file: file.relative_to(folder).as_posix())
    if not files:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise InputError(
            f"data {str(folder)!r}: expected txt files or a train file "
            f"({', '.join('train' + s for s in TABLE_READERS)}, "
            f"each also with {COMPRESSED}), found {names}: there would be nothing to train on"
        )
    splits: dict[str, list[Path]] = {}
    others: list[Path] = []
    for file in files:
        split = find_split_name(Path(file.relative_to(folder).parts[0]))
        (splits.setdefault(split, []) if split else others).append(file)
    if not others:
        for split, split_files in splits.items():
            check_single(split, [file for file in split_files if file.parent == folder])
        return splits
    if "train" in splits:
        raise InputError(
            f"data {str(folder)!r}: expected names of splits only, or none, found {str(splits['train'][0])!r} beside "
            f"{str(others[0])!r}: text held out for the test would be trained on, or text for training left out"
        )
    return {"train": files}


def _is_table(file: Path) -> bool:
    """Returns whether the file is a table; json files, which may be settings, only if they are named after a split."""
    return find_format(file) in TABLE_READERS and (find_format(file) != ".json" or find_split_name(file) is not None)


def _read_column(table: pa.Table, column: str | None, where: str) -> list[str]:
    # Only the name `text`: from a table of questions and answers, half would be left out without notice.
    name = column or find_column(table, ("text",))
    if name is None:
        raise missing_column_error("text", ("text",), table, where)
    values = table[find_columns(table, DataConfig(text=name), where, labelled=False).text]
    return [value or "" for value in iterate_cells(values)]
