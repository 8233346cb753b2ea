"""The output folder of a run: checks, locking, and detection of its removal."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

from distill.errors import InputError
from pipelines.runs.files import write_json

MARKER = "stillroom.json"
_FORMAT = 2  # format of the stages; since 2, their keys include the versions of their algorithms
DEEPEST = Path(*("n" * 100 for _ in range(3)))  # approximate maximum length of paths within a run's folder
REASONS = {
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EROFS: "no permission to write there (the file system is read-only)",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.ELOOP: "the symbolic links there form a loop",
}


def check_output(output: Path) -> None:
    """Checks that a run can be written to a folder.

    Raises:
        InputError: No run can be written there.
    """
    if "\0" in str(output):
        raise InputError(f"output {str(output)!r}: expected a path, found a null character in it")
    with name_output_in_errors(output):
        check_path(output)
        (output / DEEPEST).exists()
        if not output.is_dir():
            return
        if any(output.iterdir()) and not (output / MARKER).is_file():
            names = ", ".join(sorted(path.name for path in output.iterdir())[:5])
            raise InputError(
                f"output {str(output)!r}: expected an empty folder or that of an earlier run, found other files "
                f"({names}); nothing was overwritten: choose another folder"
            )


def check_path(output: Path) -> None:
    """Checks that the output's path can be created.

    Raises:
        InputError: The output or one of its parents is a file or a broken link.
    """
    for place in (output, *output.parents):
        if place.is_dir():
            return
        location = "" if place == output else f" at {str(place)!r}"
        if place.is_symlink() and not place.exists():
            raise InputError(
                f"output {str(output)!r}: expected a folder, found a link to {str(place.readlink())!r}, which doesn't "
                f"exist{location}; nothing was written: create that folder, or remove the link"
            )
        if os.path.lexists(place):
            raise InputError(
                f"output {str(output)!r}: expected a folder, found a file{location}; nothing was overwritten"
            )


def write_unedited(folder: Path, files: Mapping[str, str]) -> None:
    """Writes text files that users may edit, by name.

    Raises:
        InputError: The folder can't be created, or a file of that name has other content, perhaps edited by hand.
    """
    check_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        if path.is_dir() or (path.exists() and path.read_text() != text):
            raise InputError(
                f"{path}: expected no other content there, found a {'folder' if path.is_dir() else 'file'}, which may "
                "have been edited; nothing was overwritten: remove it, or choose another --output"
            )
    for name, text in files.items():
        (folder / name).write_text(text)


def open_output(output: Path) -> tuple[TextIO, bool]:
    """Creates the folder and locks it until the process ends, however it ends.

    Returns:
        (lock, whether the folder's stages have an older format)

    Raises:
        InputError: The folder can't be written, or another process is writing there.
    """
    with name_output_in_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(output)
        older = (output / MARKER).is_file() and read_format(output / MARKER) != _FORMAT
        write_json(output / MARKER, {"stillroom": find_version(), "format": _FORMAT})
    return lock, older


def find_version() -> str:
    """Returns the installed version; `checkout` if the commands run in a checkout that isn't installed."""
    try:
        return version("stillroom")
    except PackageNotFoundError:
        return "checkout"


def read_format(marker: Path) -> object:
    """Returns the format that a marker file states; the current one if the file is damaged."""
    try:
        content = json.loads(marker.read_bytes())
    except ValueError:  # truncated; the stages' own manifests are checked separately
        return _FORMAT
    return content.get("format") if isinstance(content, dict) else _FORMAT


def lock_folder(output: Path) -> TextIO:
    """Returns an open file whose lock other processes can't take until it is closed.

    Raises:
        InputError: Another process holds the lock.
    """
    lock = (output / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"output {str(output)!r}: another process is writing there; wait for it or stop it") from None
    return lock


@contextmanager
def name_output_in_errors(output: Path) -> Iterator[None]:
    """Adds the output's name to the system's error messages; a full disk is reported elsewhere."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = REASONS.get(error.errno or 0, error.strerror)
        raise InputError(f"output {str(output)!r}: {reason}; nothing was changed: choose another folder") from error


def check_not_removed(output: Path) -> None:
    """Checks that the folder of a run still exists.

    Raises:
        InputError: The folder was removed during the run.
    """
    if not (output / MARKER).is_file():
        raise InputError(
            f"output {str(output)!r}: it was removed or renamed during the run, and its content is lost: remove what "
            "is left of it, and run the same command again"
        )
