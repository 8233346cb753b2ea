"""Content hashes of large files of text and tokens, remembered so that a later run doesn't read the files again."""

import json
from pathlib import Path

from distill.checkpoint.digest import hash_file
from pipelines.runs.files import write_json

DIGESTS = "digests.json"  # in the output folder
REMEMBERED = (".parquet", ".jsonl", ".txt", ".tokens")  # weights are always read in full
REMEMBERED_FROM = 64 << 20  # bytes; smaller files are read in a moment


class DigestIndex:
    """Hashes by the file's device and inode, which renaming keeps, its size, and the time of its last change.

    A file whose size or time differs is read again. As in make or git, a change that keeps both stays unnoticed.

    Args:
        file: The JSON file that holds the index; a missing or damaged one is empty.
        writes: Whether this process adds to the file.
    """

    def __init__(self, file: Path, *, writes: bool):
        self.file, self.writes = file, writes
        try:
            self.known: dict[str, str] = dict(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            self.known = {}

    def hash_file(self, path: Path) -> str:
        """Returns the SHA-256 of a file; of a large file of text or tokens, the remembered one if it is unchanged."""
        status = path.stat()
        if status.st_size < REMEMBERED_FROM or path.suffix not in REMEMBERED:
            return hash_file(path)
        key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        if key not in self.known:
            self.known[key] = hash_file(path)
            if self.writes:
                write_json(self.file, self.known)
        return self.known[key]
