"""Virtual environments of third-party programs, whose packages must stay apart from those of the tests."""

import os
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Returns a folder for what is slow to make: later sessions find it again."""
    session = factory.getbasetemp()
    return (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session).parent / name


def make_environment(folder: Path, packages: Sequence[str]) -> Path:
    """Returns the Python of an environment with these packages, which is made unless it is complete."""
    python, complete = folder / "bin/python", folder / "packages.txt"
    if not complete.exists() or complete.read_text() != "\n".join(packages):
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *packages], check=True, timeout=900)
        complete.write_text("\n".join(packages))
    return python
