"""Lints, type-checks and runs the quick tests of what changed since a commit, for `make quick`.

python tools/quick.py [COMMIT]     COMMIT is HEAD by default: what isn't committed yet
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("distill", "compress", "pipelines")
TEST_FOLDERS = {"tools": "tests/unit/tools", "benchmarks": "tests/integration/benchmarks"}  # of code beside them


def main() -> None:
    """Runs all checks; exits with the code of the first that fails."""
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    files = list_changes(commit)
    python = [name for name in files if name.endswith(".py") and (ROOT / name).is_file()]
    if not python:
        print("quick: no Python file changed")
        return
    tests = select_tests(files)
    run_tool("ruff", "check", *python)
    run_tool("ruff", "format", "--check", *python)
    run_tool("mypy")
    print(f"quick: {len(tests)} files of tests")
    if tests:
        run_tool("pytest", "-q", *tests)


def list_changes(commit: str) -> list[str]:
    """Returns tracked files that differ from the commit, and new ones that git doesn't ignore."""
    tracked = run_git("diff", "--name-only", commit)
    return sorted({*tracked, *run_git("ls-files", "--others", "--exclude-standard")})


def select_tests(files: list[str]) -> list[str]:
    """Returns the changed tests and those of changed modules: `tests/unit` mirrors the packages.

    All tests of the tools or of the benchmarks are returned if one of these changed; pytest leaves out slow ones.
    """
    tests: set[str] = set()
    for name in files:
        path = Path(name)
        if is_quick_test(path):
            tests.add(name)
        elif path.parts[0] in TEST_FOLDERS:
            folder = ROOT / TEST_FOLDERS[path.parts[0]]
            tests |= {str(test.relative_to(ROOT)) for test in folder.glob("test_*.py")}
        elif path.parts[0] in PACKAGES and path.suffix == ".py":
            tests |= {str(test.relative_to(ROOT)) for test in find_tests(path.parent)}
            tests.add("tests/unit/test_package_boundaries.py")
    return sorted(tests)


def is_quick_test(path: Path) -> bool:
    """Returns whether a path is an existing file of tests that run in `make quick`."""
    is_listed = any(path.is_relative_to(folder) for folder in ("tests/unit", *TEST_FOLDERS.values()))
    return is_listed and path.name.startswith("test_") and (ROOT / path).is_file()


def find_tests(package: Path) -> list[Path]:
    """Returns the test files of the package, or of the nearest package above it that has any."""
    for folder in (package, *package.parents[:-1]):
        tests = sorted((ROOT / "tests" / "unit" / folder).glob("test_*.py"))
        if tests:
            return tests
    return []


def run_git(*arguments: str) -> list[str]:
    """Returns the lines that a git command prints."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)  # noqa: S603 - own words
    return done.stdout.splitlines()


def run_tool(tool: str, *arguments: str) -> None:
    """Runs a tool of this environment; exits with its exit code if it fails."""
    command = [sys.executable, "-m", tool, *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603 - own words
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
