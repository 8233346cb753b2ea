"""Virtual environments of third-party programs, whose packages must stay apart from those of the tests."""

import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# What pip and apt print where no server can be reached.
UNREACHABLE = (
    *("connection broken", "connection error", "connectionerror", "newconnectionerror", "max retries exceeded"),
    *("temporary failure in name resolution", "name or service not known", "network is unreachable"),
    *("temporary failure resolving", "could not resolve"),
)


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Returns a folder for what is slow to make: later sessions find it again."""
    session = factory.getbasetemp()
    return (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session).parent / name


def make_environment(folder: Path, packages: Sequence[str]) -> Path:
    """Returns the Python of an environment with these packages, which is made unless it is complete.

    Skips the test if the packages can't be downloaded for want of a network.
    """
    python, complete = folder / "bin/python", folder / "packages.txt"
    content = "\n".join([sys.version, *packages])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers and sessions share the folder
        if not complete.exists() or complete.read_text() != content:
            venv.create(folder, with_pip=True, clear=True)
            run_or_skip([python, "-m", "pip", "install", "-q", *packages], timeout=900)
            complete.write_text(content)
    return python


def run_or_skip(command: Sequence[str | Path], **options: Any) -> None:
    """Runs a command that downloads packages; skips the test if it fails for want of a network.

    Args:
        command: The command.
        options: Of `subprocess.run`.
    """
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options
    )  # fmt: skip
    unreachable = [line for line in done.stdout.splitlines() if any(each in line.lower() for each in UNREACHABLE)]
    if done.returncode and unreachable:
        pytest.skip(f"no network: {unreachable[0].strip()}")
    assert done.returncode == 0, done.stdout
