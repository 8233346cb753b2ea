"""One broken input: how it is made of a good one, and what the command has to answer."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Words = dict[str, str | list[str]]  # flag -> value, or the values of a flag that is given several times
REFUSED, ACCEPTED = 2, 0


@dataclass(frozen=True)
class Place:
    """A folder of copies that a case may damage: `teacher/`, `data/`, `student/`, and `run/`, where the output goes."""

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
    """
    Args:
        name: Of the test.
        damage: Damages the place, and returns the flags that the command gets beside the usual ones.
        message: Regular expression that is found in what the command prints.
        ends: Exit code.
    """

    name: str
    damage: Callable[[Place], Words]
    message: str
    ends: int = REFUSED


def place_from(pristine: Path, root: Path) -> Place:
    shutil.copytree(pristine, root, dirs_exist_ok=True, symlinks=True)
    return Place(root)
