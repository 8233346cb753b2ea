"""Writing of files and folders, completely or not at all, and their hashes."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distill.checkpoint.digest import hash_content as hash_content
from distill.checkpoint.digest import hash_files as hash_files


def count_bytes(folder: Path) -> int:
    """Returns the bytes on disk of all files in the folder, which are all needed to deploy it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file atomically."""
    write_bytes(path, json.dumps(content, indent=1, default=str).encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically: to a temporary file that is then renamed."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder to fill, which replaces `folder` when the block ends without an error.

    A portable rename can't replace a folder that has content, so the old one is renamed first. A process that is killed
    between the two renames leaves no `folder`; the next call, or `recover_folder`, restores the old one.
    """
    recover_folder(folder)
    fresh, old = fresh_path(folder), old_path(folder)
    remove_path(fresh)
    fresh.mkdir(parents=True)
    yield fresh
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Restores a folder whose replacement was killed between its renames, and removes the old one otherwise."""
    old = old_path(folder)
    if os.path.lexists(old) and not os.path.lexists(folder):
        old.rename(folder)
    remove_path(old)


def fresh_path(folder: Path) -> Path:
    """Returns where the new content of a folder is written before it replaces the folder."""
    return folder.with_name(f".{folder.name}.new")


def old_path(folder: Path) -> Path:
    """Returns where a folder is kept while its replacement is renamed."""
    return folder.with_name(f".{folder.name}.old")


def remove_path(path: Path) -> None:
    """Removes a file or folder if it exists; of a link, only the link itself."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
