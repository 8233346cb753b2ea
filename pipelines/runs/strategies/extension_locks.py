"""Locks of compiled extensions that a killed process has left.

torch compiles an extension under a lock file, and deletes the file afterwards. A process that is killed in between
leaves it there, and all later ones wait for ever: torch.utils.file_baton doesn't look whether anybody still compiles.
"""

import os
import time
import warnings
from pathlib import Path

from torch.utils import cpp_extension

ORPHANED = 60.0  # seconds after which a lock that no process of this machine holds isn't another machine's either
_PROCESSES = Path("/proc")


def clear_orphaned_locks(*, deletes: bool) -> None:
    """Waits until each lock is gone, or held by a process of this machine.

    Args:
        deletes: Whether this process deletes orphaned locks; one on each machine does, and the others wait for it.
    """
    for lock in list_locks():
        while is_orphaned(lock):
            if deletes and measure_age(lock) > ORPHANED:
                lock.unlink(missing_ok=True)
                warnings.warn(f"deleted {lock}: the process that was compiling there has ended", stacklevel=2)
            time.sleep(0.1)


def list_locks() -> list[Path]:
    """Returns the locks of all extensions that torch compiles for this user."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return sorted(Path(chosen).glob("*/lock"))
    return sorted(Path(cpp_extension.get_default_build_root()).glob("*/*/lock"))  # in a folder for each Python


def is_orphaned(lock: Path) -> bool:
    """Returns whether a lock exists that no process of this machine holds; False where there is no /proc to tell."""
    if not lock.exists() or not _PROCESSES.is_dir():
        return False
    file = lock.resolve()
    return not any(has_open(process, file) for process in _PROCESSES.iterdir() if process.name.isdecimal())


def has_open(process: Path, file: Path) -> bool:
    """Returns whether a process has a file open, by its resolved path; False for other users', which can't be read."""
    try:
        return any(Path(entry.path).readlink() == file for entry in os.scandir(process / "fd"))
    except OSError:
        return False


def measure_age(file: Path) -> float:
    """Returns the seconds since a file was written; 0 if it is gone."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
