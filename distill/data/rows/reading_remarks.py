"""Remarks for the user on how a data set is read, where the result doesn't show it."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from distill.data.config import DataConfig
from distill.data.rows.sentences import LINES, find_part_files
from distill.data.sources.files import SPLITS, find_format
from distill.data.sources.separated import SEPARATORS, find_separator, read_content
from distill.data.sources.tables import TABLE_READERS, find_split_files, load_hub
from distill.data.sources.text_files import find_text_files

_SHOWN = 5  # maximum number of file names in a sentence


def describe_reading(config: DataConfig) -> list[str]:
    """Returns remarks on separators and on unread files.

    There is a sentence for each csv file with a separator other than a comma, and one for the files or splits of the
    data set that are not read.

    Raises:
        InputError: The data set does not exist or has no train split.
    """
    path = Path(config.path).expanduser()
    remarks = _describe_source(path, config)
    if config.unlabelled is not None:
        remarks += _describe_separators([Path(config.unlabelled).expanduser()])
    return remarks


def _describe_source(path: Path, config: DataConfig) -> list[str]:
    if path.is_file():
        return _describe_separators([path])
    if not path.is_dir():
        names = [str(split) for split in load_hub(config.path, config.subset)]
        return _describe_unread([name for name in names if name not in SPLITS], "their names aren't those of splits")
    if texts := find_text_files(config.path):
        read = {file for files in texts.values() for file in files}
        others = [file for file in path.rglob("*") if file.is_file() and file not in read]
        return _describe_unread(_list_names(path, others), "they aren't txt files")
    tables = (find_part_files(path) if (path / LINES).is_file() else find_split_files(path)).values()
    others = [file for file in path.iterdir() if file not in tables and _looks_like_data(file)]
    return _describe_separators(tables) + _describe_unread(
        _list_names(path, others), "their names or extensions aren't those of a split's file"
    )


def _list_names(folder: Path, files: Iterable[Path]) -> list[str]:
    """Returns paths relative to the folder, without hidden files and files in hidden folders."""
    names = sorted(file.relative_to(folder).as_posix() for file in files)
    return [name for name in names if not any(part.startswith(".") for part in name.split("/"))]


def _looks_like_data(file: Path) -> bool:
    """Returns whether the file has the extension of a data format, or a name that begins with the name of a split."""
    return find_format(file) in (*TABLE_READERS, ".txt") or re.split(r"[\W_]", file.name.lower())[0] in SPLITS


def _describe_separators(files: Iterable[Path]) -> list[str]:
    """Describes the separators of csv files that aren't commas; the other formats have a fixed separator."""
    separators = {file: find_separator(read_content(file)) for file in files if find_format(file) == ".csv"}
    return [
        f"{file.name}: its columns are separated by {SEPARATORS[separator]}"
        for file, separator in separators.items()
        if separator != ","
    ]


def _describe_unread(names: Collection[str], reason: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"not read: {', '.join(list(names)[:_SHOWN])}{more}, because {reason}"]
