"""Data files: format and split from the file name, and content, compressed or not."""

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from distill.errors import InputError

COMPRESSED = ".gz"
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}
SPLITS |= {"test": "test"}
POINTER = b"version https://git-lfs"


def is_compressed(file: Path) -> bool:
    """Returns whether the file's name ends in `.gz`."""
    return file.suffix.lower() == COMPRESSED


def find_format(file: Path) -> str:
    """Returns the extension that names the format, in lower case: `.csv` for `train.csv` and `train.CSV.gz`."""
    return (file.with_suffix("") if is_compressed(file) else file).suffix.lower()


def find_split_name(file: Path) -> str | None:
    """Returns the split that a file is named after; None for other names."""
    whole = file.with_suffix("") if is_compressed(file) else file
    return SPLITS.get(whole.stem.lower())


@contextmanager
def open_bytes(file: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading, decompressed if its name ends in `.gz`.

    Raises:
        InputError: The file does not exist, is a folder or a Git LFS pointer, can't be read, is compressed without
            `.gz` in its name, is UTF-16, or is truncated or damaged (also raised while it is read).
    """
    where = f"data {str(file)!r}"
    if not file.is_file():
        found = "a folder" if file.is_dir() else "something else"
        raise InputError(f"{where}: {f'expected a file, found {found}' if file.exists() else 'no such file'}")
    try:
        with file.open("rb") as stream:
            _check_first_bytes(stream.read(len(POINTER)), file)
            stream.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if is_compressed(file) else stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{where}: expected a complete gzip file, found one that is damaged or cut off: {error}: rows would be "
            "missing"
        ) from error
    except OSError as error:
        raise InputError(f"{where}: can't be read: {os.strerror(error.errno) if error.errno else error}") from error


def _check_first_bytes(head: bytes, file: Path) -> None:
    """Checks the first bytes of a file.

    Raises:
        InputError: The file is a Git LFS pointer, UTF-16 text, or compressed under a name without `.gz`.
    """
    if head == POINTER:
        raise InputError(f"data {str(file)!r}: found a Git LFS pointer, not the data: run `git lfs pull` there")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"data {str(file)!r}: expected text in UTF-8, found UTF-16: save it as UTF-8")
    if head.startswith(b"\x1f\x8b") and not is_compressed(file):
        raise InputError(
            f"data {str(file)!r}: expected a file in the format of its extension, found one compressed by gzip: name "
            f"it {file.name}{COMPRESSED}"
        )


def read_utf8(file: Path) -> str:
    """Returns the text of a file without a byte order mark; line endings are unchanged.

    Raises:
        InputError: `open_bytes` fails, or the content is not UTF-8.
    """
    with open_bytes(file) as stream:
        content = stream.read()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"data {str(file)!r}: expected text in UTF-8, found 0x{content[error.start]:02x} at byte {error.start} "
            f"(line {1 + content.count(bytes([10]), 0, error.start)}): the model would learn wrong characters"
        ) from error
