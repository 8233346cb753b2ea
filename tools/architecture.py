"""Draws the rooms of the code from their imports, and lists them in docs/architecture.md.

python tools/architecture.py             writes docs/images/rooms.svg and the table of rooms
python tools/architecture.py --check     exits with code 1 if either differs from the code

Both report files and functions of the page's table of a sample's way that don't exist.

The rooms are those of tests/unit/test_walls.py, which also checks that imports run one way.
"""

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from layered_drawing import Box, draw

ROOT = Path(__file__).parents[1]
WALLS = ROOT / "tests" / "unit" / "test_walls.py"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms:begin -->\n", "<!-- rooms:end -->"
COLOURS = {"distill": "#e3eefc", "compress": "#fdebd8", "pipelines": "#e4f4e4"}


def rooms() -> tuple[str, ...]:
    """Returns the names of the rooms, such as `distill.losses`; each imports from those before it only."""
    for node in ast.parse(WALLS.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS":
            return ast.literal_eval(node.value)
    raise ValueError(f"{WALLS}: expected an assignment of ROOMS, found none: nothing says which rooms there are")


def modules() -> dict[str, Path]:
    """Returns dotted name -> file of every module of the three packages."""
    files = sorted(file for package in COLOURS for file in (ROOT / package).rglob("*.py"))
    return {".".join(parts_of(file)): file for file in files}


def parts_of(file: Path) -> tuple[str, ...]:
    """Returns the module path of a file as parts."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_modules(file: Path, known: dict[str, Path]) -> set[str]:
    """Returns the modules of this repository that a file imports, at its top or when it is called."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} if inner - set(known) else set()
            found |= inner
    return found & set(known)


def imports_between_rooms() -> dict[str, list[str]]:
    """Returns room -> rooms that it imports from, where a room includes the rooms inside it."""
    known, every = modules(), rooms()
    found: dict[str, set[str]] = {outer_room(room): set() for room in every}
    for name, file in known.items():
        own = outer_room(room_of(name, every))
        found[own] |= {outer_room(room_of(other, every)) for other in imported_modules(file, known)} - {own}
    return {room: sorted(others) for room, others in found.items()}


def room_of(module: str, every: Sequence[str]) -> str:
    """Returns the folder or module of `every` that a module belongs to."""
    return module if module in every else module.rpartition(".")[0]


def outer_room(room: str) -> str:
    """Returns the room that the picture shows for a room: `distill.data.rows` -> `distill.data`."""
    return ".".join(room.split(".")[:2])


def purpose(room: str) -> str:
    """Returns the first line of the docstring of the room's package."""
    text = ast.get_docstring(ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text()))
    return (text or "").splitlines()[0]


def picture() -> str:
    """Returns the SVG of the rooms; the packages' own modules (their errors) are imported everywhere, and left out."""
    arrows = imports_between_rooms()
    shown = [room for room in arrows if room not in ("distill", "compress")]
    boxes = [Box(room, purpose(room), COLOURS[room.split(".")[0]]) for room in shown]
    return draw(boxes, {room: [other for other in arrows[room] if other in shown] for room in shown})


def page_with_table() -> str:
    """Returns the text of the architecture page with the table of rooms between its marks.

    Raises:
        ValueError: The page lacks the marks.
    """
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: expected {BEGIN.strip()} and {END}, found none: the table of rooms has no place")
    rows = [f"| `{room.replace('.', '/')}/` | {purpose(room)} |" for room in rooms()]
    table = "\n".join(["| room | what it holds |", "|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


def missing_names(page: str) -> list[str]:
    """Returns `file: name` for each row `| file | name | … |` of a page whose file doesn't define the name."""
    missing = []
    for place, name in re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", page, re.M):
        file = ROOT / place
        if not file.is_file() or name not in defined_names(file):
            missing.append(f"{place}: {name}")
    return missing


def defined_names(file: Path) -> set[str]:
    """Returns the names that a file defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


def main(argv: Sequence[str]) -> int:
    """Writes the picture and its page, or with `--check` compares them with the code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare picture and table with the code")
    given = parser.parse_args(argv)
    missing = missing_names(PAGE.read_text())
    for name in missing:
        print(f"{PAGE.relative_to(ROOT)}: names {name}, which doesn't exist", file=sys.stderr)
    stale = int(bool(missing))
    for file, text in ((PICTURE, picture()), (PAGE, page_with_table())):
        if not given.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif not file.is_file() or file.read_text() != text:
            print(f"{file.relative_to(ROOT)}: differs from the code; run python tools/architecture.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
