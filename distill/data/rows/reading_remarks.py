"""Remarks for the user on how a data set is read, where the result doesn't show it."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from distill.data.config import DataConfig
from distill.data.rows.sentences import LINES, part_files
from distill.data.sources.files import SPLITS, format_of
from distill.data.sources.separated import SEPARATORS, content_of, find_separator
from distill.data.sources.tables import READERS, load_hub, split_files
from distill.data.sources.text_files import text_files

SHOWN = 5  # maximum number of file names in a sentence


def describe_reading(config: DataConfig) -> list[str]:
    """Returns a sentence for each csv file with a separator other than a comma, and one for the files or splits of the
    data set that are not read.

    Raises:
        InputError: The data set does not exist or has no train split.
    """
    place = Path(config.path).expanduser()
    said = describe_place(place, config)
    if config.unlabelled is not None:
        said += describe_separators([Path(config.unlabelled).expanduser()])
    return said


def describe_place(place: Path, config: DataConfig) -> list[str]:
    if place.is_file():
        return describe_separators([place])
    if not place.is_dir():
        names = [str(split) for split in load_hub(config.path, config.subset)]
        return describe_unread([name for name in names if name not in SPLITS], "their names are no splits'")
    if texts := text_files(config.path):
        read = {file for files in texts.values() for file in files}
        others = [file for file in place.rglob("*") if file.is_file() and file not in read]
        return describe_unread(names_in(place, others), "they aren't txt files")
    tables = (part_files(place) if (place / LINES).is_file() else split_files(place)).values()
    others = [file for file in place.iterdir() if file not in tables and looks_like_data(file)]
    return describe_separators(tables) + describe_unread(
        names_in(place, others), "their names or endings aren't those of a split's file"
    )


def names_in(place: Path, files: Iterable[Path]) -> list[str]:
    """Returns paths relative to the folder, without hidden files and files in hidden folders."""
    names = sorted(file.relative_to(place).as_posix() for file in files)
    return [name for name in names if not any(part.startswith(".") for part in name.split("/"))]


def looks_like_data(file: Path) -> bool:
    """Returns whether the file has the extension of a data format, or a name that begins with the name of a split."""
    return format_of(file) in (*READERS, ".txt") or re.split(r"[\W_]", file.name.lower())[0] in SPLITS


def describe_separators(files: Iterable[Path]) -> list[str]:
    """Describes the separators of csv files that aren't commas; the other formats have a fixed separator."""
    found = {file: find_separator(content_of(file)) for file in files if format_of(file) == ".csv"}
    return [
        f"{file.name}: its columns are separated by {SEPARATORS[separator]}"
        for file, separator in found.items()
        if separator != ","
    ]


def describe_unread(names: Collection[str], why: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"not read: {', '.join(list(names)[:SHOWN])}{more}, for {why}"]
