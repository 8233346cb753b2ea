"""Copies of the files of this checkout, also of changes that aren't committed, and commands of git."""

import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

from support.commands import ROOT


def copy_checkout(folder: Path) -> Path:
    """Copies the files that git tracks and new ones that it doesn't ignore, and returns the folder.

    Without git, as in an unpacked archive, everything is copied that no pattern of .gitignore names.
    """
    names = list_files()
    if names is None:
        return Path(shutil.copytree(ROOT, folder, ignore=list_ignored))
    for name in names:
        if (ROOT / name).is_file():  # not if it was removed and that isn't committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def list_files() -> list[str] | None:
    """Returns the paths of the files that belong to the checkout; None if git can't tell."""
    if not (ROOT / ".git").exists():
        return None
    try:
        listed = run_git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError):
        return None
    return listed.split("\0")[:-1]


def list_ignored(source: str, names: list[str]) -> list[str]:
    """Returns the names in a folder that .gitignore names, for `shutil.copytree`; `/runs/` holds at the root only."""
    patterns = [".git", *(ROOT / ".gitignore").read_text().split()]
    applicable = [each.strip("/") for each in patterns if not each.startswith("/") or Path(source) == ROOT]
    return [name for name in names if any(fnmatch(name, each) for each in applicable)]


def run_git(folder: Path, *arguments: str) -> str:
    """Returns what a command of git prints; commits are those of a made-up author, unsigned and without hooks."""
    settings = ("user.name=a", "user.email=a@b.c", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    command = ["git", *(word for each in settings for word in ("-c", each)), *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
