"""How a data set is read: what a person should hear of it who can't see it in the result."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from distill.data.config import DataConfig
from distill.data.rows.sentences import LINES, part_files
from distill.data.sources.files import SPLITS, format_of
from distill.data.sources.separated import SEPARATORS, content_of, find_separator
from distill.data.sources.tables import READERS, load_hub, split_files
from distill.data.sources.text_files import text_files

SHOWN = 5  # names of files in one sentence


def describe_reading(config: DataConfig) -> list[str]:
    """A sentence for each file whose columns aren't separated as its ending says, and one for the files and splits of
    the data set that aren't read.

    Raises:
        InputError: There is no such data set, or no train split in it.
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
    """Names within the folder, without those that are hidden or stand in a hidden folder."""
    names = sorted(file.relative_to(place).as_posix() for file in files)
    return [name for name in names if not any(part.startswith(".") for part in name.split("/"))]


def looks_like_data(file: Path) -> bool:
    """Whether its ending is one of data, or its name begins with that of a split."""
    return format_of(file) in (*READERS, ".txt") or re.split(r"[\W_]", file.name.lower())[0] in SPLITS


def describe_separators(files: Iterable[Path]) -> list[str]:
    """Of csv files; others have but one separator."""
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
