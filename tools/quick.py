"""Lints, type-checks and runs the unit tests of what changed since a commit, for `make quick`.

python tools/quick.py [COMMIT]     COMMIT is HEAD when left out: what isn't committed yet
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("distill", "compress", "pipelines")


def main() -> None:
    """Exits with the code of the first check that fails."""
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    files = changed_files(commit)
    python = [name for name in files if name.endswith(".py") and (ROOT / name).is_file()]
    if not python:
        print("quick: no Python file changed")
        return
    tests = unit_tests(files)
    run("ruff", "check", *python)
    run("ruff", "format", "--check", *python)
    run("mypy")
    print(f"quick: {len(tests)} files of unit tests")
    if tests:
        run("pytest", "-q", *tests)


def changed_files(commit: str) -> list[str]:
    """Tracked files that differ from the commit, and new ones that git doesn't ignore."""
    tracked = git("diff", "--name-only", commit)
    return sorted({*tracked, *git("ls-files", "--others", "--exclude-standard")})


def unit_tests(files: list[str]) -> list[str]:
    """Changed unit tests, and those of the rooms of changed modules: `tests/unit` mirrors the rooms."""
    found = set()
    for name in files:
        place = Path(name)
        if place.parts[:2] == ("tests", "unit") and place.name.startswith("test_") and (ROOT / place).is_file():
            found.add(name)
        elif place.parts[0] in PACKAGES and place.suffix == ".py":
            found |= {str(test.relative_to(ROOT)) for test in tests_of_room(place.parent)}
            found.add("tests/unit/test_walls.py")
    return sorted(found)


def tests_of_room(room: Path) -> list[Path]:
    """Test files of the nearest room above that has any."""
    for folder in (room, *room.parents[:-1]):
        tests = sorted((ROOT / "tests" / "unit" / folder).glob("test_*.py"))
        if tests:
            return tests
    return []


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()


def run(tool: str, *words: str) -> None:
    """Runs a tool of this environment; ends this process with its exit code where it fails."""
    code = subprocess.run([sys.executable, "-m", tool, *words], cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
