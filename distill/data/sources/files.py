"""Data files: what their names say, and their bytes, compressed or not."""

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
    return file.suffix.lower() == COMPRESSED


def format_of(file: Path) -> str:
    """The ending that names the format, in lower case: `.csv` of `train.csv` and of `train.CSV.gz`."""
    return (file.with_suffix("") if is_compressed(file) else file).suffix.lower()


def split_of(file: Path) -> str | None:
    """The split that a file is named after; None where its name is another."""
    whole = file.with_suffix("") if is_compressed(file) else file
    return SPLITS.get(whole.stem.lower())


@contextmanager
def open_bytes(file: Path) -> Iterator[BinaryIO]:
    """The content of a file, decompressed where its name ends in `.gz`.

    Raises:
        InputError: No such file, a folder, a pointer to a file elsewhere, no permission, a compressed file under a name
            that doesn't say so, or one that is cut off or damaged (also while it is read).
    """
    where = f"data {str(file)!r}"
    if not file.is_file():
        found = "a folder" if file.is_dir() else "something else"
        raise InputError(f"{where}: {f'expected a file, found {found}' if file.exists() else 'no such file'}")
    try:
        with file.open("rb") as stream:
            check_head(stream.read(len(POINTER)), file)
            stream.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if is_compressed(file) else stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{where}: expected a whole gzip file, found one that is damaged or cut off: {error}: rows would be missing"
        ) from error
    except OSError as error:
        raise InputError(f"{where}: can't be read: {os.strerror(error.errno) if error.errno else error}") from error


def check_head(head: bytes, file: Path) -> None:
    """
    Raises:
        InputError: The first bytes aren't those of data.
    """
    if head == POINTER:
        raise InputError(f"data {str(file)!r}: found a Git LFS pointer, not the data: run `git lfs pull` there")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"data {str(file)!r}: expected text in UTF-8, found UTF-16: save it as UTF-8")
    if head.startswith(b"\x1f\x8b") and not is_compressed(file):
        raise InputError(
            f"data {str(file)!r}: expected a file as its ending says, found one compressed by gzip: name it "
            f"{file.name}{COMPRESSED}"
        )


def read_utf8(file: Path) -> str:
    """The text of a file, without a byte order mark; line ends stay as they are.

    Raises:
        InputError: What `open_bytes` raises, or bytes that aren't UTF-8.
    """
    with open_bytes(file) as stream:
        content = stream.read()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"data {str(file)!r}: expected text in UTF-8, found 0x{content[error.start]:02x} at byte {error.start} "
            f"(line {1 + content.count(bytes([10]), 0, error.start)}): other characters than the author's would be "
            "learned"
        ) from error
