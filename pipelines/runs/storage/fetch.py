"""Local copies of folders in an object store, which the processes of a machine share and later runs find again."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from distill.errors import InputError
from pipelines.runs.files import write_json
from pipelines.runs.storage.remote import RemoteFolder, Stored, find_cache

COPIES, RECORD = "copies", "copy.json"  # folder in the cache; which objects a copy has, beside it


def fetch(url: str, setting: str) -> Path:
    """Returns the path of a local copy of what is at a URL: a folder, or a file.

    Objects that are unchanged since an earlier call aren't read again.

    Raises:
        InputError: There is nothing at the URL, or it can't be read.
    """
    remote = RemoteFolder(url, setting)
    folder = find_cache() / COPIES / hashlib.sha256(remote.url.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    name = PurePosixPath(remote.url).name
    with lock_copy(folder):
        objects = remote.list()
        if not objects:
            raise InputError(f"{setting} {url!r}: expected a folder or a file, found nothing there")
        known = read_known(folder / RECORD)
        copy = folder / name
        for path, stored in objects.items():
            file = copy / path if path else copy
            if known.get(path) != stored or not file.exists():
                remote.download(path, file)
        for path in known.keys() - objects.keys():
            (copy / path).unlink(missing_ok=True)
        write_json(folder / RECORD, {path: list(stored) for path, stored in objects.items()})
    return copy


def read_known(record: Path) -> dict[str, Stored]:
    """Returns the objects that a copy has; empty without a readable record."""
    try:
        return {path: Stored(*stored) for path, stored in json.loads(record.read_text()).items()}
    except (OSError, ValueError, TypeError):
        return {}


@contextmanager
def lock_copy(folder: Path) -> Iterator[None]:
    """Lets one process of this machine at a time into the block."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
