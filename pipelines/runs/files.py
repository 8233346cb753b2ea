"""Writing of files and folders, completely or not at all, and their hashes."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.runs.manifest import digest_of, sha256


def file_hashes(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): sha256(p) for p in files}


def content_hash(path: Path) -> str:
    """Returns the hash of a file, or of all files of a folder and their names; symbolic links are followed."""
    return sha256(path) if path.is_file() else digest_of(file_hashes(path))


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically: to a temporary file that is then renamed."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w") as file:
        json.dump(content, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields a new folder to fill, which replaces `folder` when the block ends without an error."""
    fresh, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def artefact_bytes(folder: Path) -> int:
    """Returns the bytes on disk of all files in the folder, which are all needed to deploy it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
