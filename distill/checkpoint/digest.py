"""Content hashes of files and folders; this module doesn't import torch."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path


def hash_json(content: object) -> str:
    """Returns the SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, hash_one: Callable[[Path], str] = hash_file) -> dict[str, str]:
    """Returns relative name -> SHA-256 of all files in a folder, each computed or looked up by `hash_one`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hash_one(path) for path in files}


def hash_content(path: Path, hash_one: Callable[[Path], str] = hash_file) -> str:
    """Returns the hash of a file, or of all files of a folder and their names; symbolic links are followed."""
    return hash_one(path) if path.is_file() else hash_json(hash_files(path, hash_one))
