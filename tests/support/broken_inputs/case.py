"""A broken input: how it is created from a valid one, and how the command must react."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Flags = dict[str, str | list[str]]  # flag -> value, or values of a repeated flag
REJECTED, ACCEPTED = 2, 0


@dataclass(frozen=True)
class Workspace:
    """A folder of copies that a case may damage: `teacher/`, `data/`, `student/`, and `run/` for the output."""

    root: Path

    @property
    def teacher(self) -> Path:
        return self.root / "teacher"

    @property
    def student(self) -> Path:
        return self.root / "student"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def run(self) -> Path:
        return self.root / "run"

    def written(self, name: str, content: str | bytes) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file


@dataclass(frozen=True)
class Case:
    """A broken input and the expected reaction.

    Args:
        name: Id of the test.
        damage: Damages the workspace and returns the flags that are passed in addition to the usual ones.
        message: Regular expression that must match somewhere in the command's output; in its error, if it is rejected.
        ends: Expected exit code.
    """

    name: str
    damage: Callable[[Workspace], Flags]
    message: str
    ends: int = REJECTED


def copy_workspace(pristine: Path, root: Path) -> Workspace:
    shutil.copytree(pristine, root, dirs_exist_ok=True, symlinks=True)
    return Workspace(root)
