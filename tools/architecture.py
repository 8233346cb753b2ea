"""Draws the packages of the code from their imports, and lists them in docs/architecture.md.

python tools/architecture.py             writes docs/images/packages.svg and the table of packages
python tools/architecture.py --check     exits with code 1 if either differs from the code

Both report files and functions of the page's table of a sample's way that don't exist.

The packages are those of tests/unit/test_package_boundaries.py, which also checks that imports run one way.
"""

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from layered_drawing import Box, draw

ROOT = Path(__file__).parents[1]
BOUNDARIES = ROOT / "tests" / "unit" / "test_package_boundaries.py"
PICTURE = ROOT / "docs" / "images" / "packages.svg"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- packages:begin -->\n", "<!-- packages:end -->"
COLORS = {"distill": "#e3eefc", "compress": "#fdebd8", "pipelines": "#e4f4e4"}


def list_packages() -> tuple[str, ...]:
    """Returns the names of the packages, such as `distill.losses`; each imports from those before it only."""
    for node in ast.parse(BOUNDARIES.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            return ast.literal_eval(node.value)
    raise ValueError(f"{BOUNDARIES}: expected an assignment of PACKAGES, found none: the packages are unknown")


def modules() -> dict[str, Path]:
    """Returns dotted name -> file of every module of the three packages."""
    files = sorted(file for package in COLORS for file in (ROOT / package).rglob("*.py"))
    return {".".join(split_path(file)): file for file in files}


def split_path(file: Path) -> tuple[str, ...]:
    """Returns the module path of a file as parts."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_modules(file: Path, known: dict[str, Path]) -> set[str]:
    """Returns the modules of this repository that a file imports, at its top or when it is called."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {node.module} if inner - set(known) else set()
            imported |= inner
    return imported & set(known)


def imports_between_packages() -> dict[str, list[str]]:
    """Returns package -> packages that it imports from, where a package includes the packages inside it."""
    known, packages = modules(), list_packages()
    imports: dict[str, set[str]] = {outer_package(package): set() for package in packages}
    for name, file in known.items():
        importer = outer_package(find_package(name, packages))
        imports[importer] |= {
            outer_package(find_package(other, packages)) for other in imported_modules(file, known)
        } - {importer}
    return {package: sorted(others) for package, others in imports.items()}


def find_package(module: str, packages: Sequence[str]) -> str:
    """Returns the folder or module of `packages` that a module belongs to."""
    return module if module in packages else module.rpartition(".")[0]


def outer_package(package: str) -> str:
    """Returns the package that the picture shows for a package: `distill.data.rows` -> `distill.data`."""
    return ".".join(package.split(".")[:2])


def purpose(package: str) -> str:
    """Returns the first line of a package's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text()))
    return (text or "").splitlines()[0]


def picture() -> str:
    """Returns the SVG of the packages, without the errors of distill and compress, which are imported everywhere."""
    arrows = imports_between_packages()
    shown = [package for package in arrows if package not in ("distill", "compress")]
    boxes = [Box(package, purpose(package), COLORS[package.split(".")[0]]) for package in shown]
    return draw(boxes, {package: [other for other in arrows[package] if other in shown] for package in shown})


def page_with_table() -> str:
    """Returns the text of the architecture page with the table of packages between its marks.

    Raises:
        ValueError: The page lacks the marks.
    """
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: expected {BEGIN.strip()} and {END}, found none: the table of packages has no place")
    rows = [f"| `{package.replace('.', '/')}/` | {purpose(package)} |" for package in list_packages()]
    table = "\n".join(["| package | what it holds |", "|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


def missing_names(page: str) -> list[str]:
    """Returns `file: name` for each row `| file | name | … |` of a page whose file doesn't define the name."""
    missing = []
    for path, name in re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", page, re.M):
        file = ROOT / path
        if not file.is_file() or name not in defined_names(file):
            missing.append(f"{path}: {name}")
    return missing


def defined_names(file: Path) -> set[str]:
    """Returns the names that a file defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


def main(argv: Sequence[str]) -> int:
    """Writes the picture and its page, or with `--check` compares them with the code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare picture and table with the code")
    arguments = parser.parse_args(argv)
    missing = missing_names(PAGE.read_text())
    for name in missing:
        print(f"{PAGE.relative_to(ROOT)}: names {name}, which doesn't exist", file=sys.stderr)
    stale = int(bool(missing))
    for file, text in ((PICTURE, picture()), (PAGE, page_with_table())):
        if not arguments.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif not file.is_file() or file.read_text() != text:
            print(f"{file.relative_to(ROOT)}: differs from the code; run python tools/architecture.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
