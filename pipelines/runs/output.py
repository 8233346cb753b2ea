"""The output folder of a run: checks, locking, and detection of its removal."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distill.errors import InputError
from pipelines.runs.files import write_json

MARKER = "stillroom.json"
FORMAT = 2  # format of the stages; since 2, their keys include the versions of their algorithms
DEEPEST = Path(*("n" * 100 for _ in range(3)))  # approximate maximum length of paths within a run's folder
REASONS = {
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EROFS: "no permission to write there (the file system is read-only)",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.ELOOP: "the links there lead round in a circle",
}


def check_output(output: Path) -> None:
    """Checks that a run can be written to a folder.

    Raises:
        InputError: No run can be written there.
    """
    if "\0" in str(output):
        raise InputError(f"output {str(output)!r}: no folder can have this name: it holds a NUL")
    with explained(output):
        check_way(output)
        (output / DEEPEST).exists()
        if not output.is_dir():
            return
        if any(output.iterdir()) and not (output / MARKER).is_file():
            names = ", ".join(sorted(p.name for p in output.iterdir())[:5])
            raise InputError(
                f"output {str(output)!r}: the folder holds something else ({names}); nothing was overwritten: "
                "name a new or an empty folder, or one of an earlier run"
            )


def check_way(output: Path) -> None:
    """Checks that the output's path can be created.

    Raises:
        InputError: The output or one of its parents is a file or a broken link.
    """
    for place in (output, *output.parents):
        if place.is_dir():
            return
        if place.is_symlink() and not place.exists():
            raise InputError(
                f"output {str(output)!r}: expected a folder, found a link to {str(place.readlink())!r}, where there is "
                f"nothing{at(place, output)}; nothing was written: make that folder, or remove the link"
            )
        if os.path.lexists(place):
            raise InputError(
                f"output {str(output)!r}: expected a folder, found a file{at(place, output)}; nothing was overwritten"
            )


def at(place: Path, output: Path) -> str:
    return "" if place == output else f" at {str(place)!r}"


def open_output(output: Path) -> tuple[Any, bool]:
    """Creates the folder and locks it until the process ends, however it ends.

    Returns:
        (lock, whether the folder's stages have an older format)

    Raises:
        InputError: The folder can't be written, or another process is writing there.
    """
    with explained(output):
        output.mkdir(parents=True, exist_ok=True)
        lock = take_lock(output)
        older = (output / MARKER).is_file() and format_of(output / MARKER) != FORMAT
        write_json(output / MARKER, {"stillroom": version("stillroom"), "format": FORMAT})
    return lock, older


def format_of(marker: Path) -> Any:
    try:
        about = json.loads(marker.read_bytes())
    except ValueError:  # truncated; the stages' own manifests are checked separately
        return FORMAT
    return about.get("format") if isinstance(about, dict) else FORMAT


def take_lock(output: Path) -> Any:
    handle = (output / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"output {str(output)!r}: another process is writing there; wait for it or stop it") from None
    return handle


@contextmanager
def explained(output: Path) -> Iterator[None]:
    """Adds the output's name to the system's error messages; a full disk is reported elsewhere."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = REASONS.get(error.errno or 0, error.strerror)
        raise InputError(f"output {str(output)!r}: {why}; nothing was changed: name another folder") from error


def check_still_there(output: Path) -> None:
    """Checks that the folder of a run still exists.

    Raises:
        InputError: The folder was removed during the run.
    """
    if not (output / MARKER).is_file():
        raise InputError(
            f"output {str(output)!r}: it was removed, or moved, while the run was working in it; what was in it is "
            "gone: remove what is left of it, and run the same command again"
        )
