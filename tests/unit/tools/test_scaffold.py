"""`tools/scaffold.py` adds drafts that work: in a copy of the repository, their tests and the checks pass."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkout_files import copy_checkout
from support.commands import ROOT

NAMES = {"loss": "symmetric_kl", "task": "intent_detection", "export": "core_ml", "stage": "count_rows"}


def run_python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), str(copy / "tests")])}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )


def run_to_success(copy: Path, *arguments: str) -> str:
    done = run_python(copy, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the repository's files."""
    return copy_checkout(tmp_path / "copy")


def written_files(output: str) -> list[str]:
    lines = output.splitlines()
    return [line.strip() for line in lines[lines.index("Written:") + 1 : lines.index("To be written by hand:")]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_a_new_component_works_and_passes_the_checks(kind, copy):
    written = written_files(run_to_success(copy, "tools/scaffold.py", kind, NAMES[kind]))
    tests = [file for file in written if file.startswith("tests/") and NAMES[kind] in file]
    assert len(tests) == 1
    for check in (("ruff", "check", "."), ("ruff", "format", "--check", ".")):
        run_to_success(copy, "-m", *check)
    for script in ("settings_reference.py", "architecture.py"):
        run_to_success(copy, f"tools/{script}", "--check")
    tested = [
        *tests,
        "tests/unit/test_package_boundaries.py",
        *(["tests/unit/distill/losses"] if kind == "loss" else []),
    ]
    assert " passed" in run_to_success(copy, "-m", "pytest", "-q", "-n0", *tested)


@pytest.mark.parametrize("template", sorted((ROOT / "tools" / "templates").iterdir()), ids=lambda file: file.stem)
def test_what_a_template_imports_exists(template):
    lines = [line for line in template.read_text().splitlines() if line.startswith("from ") and "$" not in line]
    assert lines
    for line in lines:
        (statement,) = ast.parse(line).body
        module = importlib.import_module(statement.module)
        assert [each.name for each in statement.names if not hasattr(module, each.name)] == [], line


@pytest.mark.slow
def test_all_new_components_pass_the_type_checker_together(copy):
    for kind, name in NAMES.items():
        run_to_success(copy, "tools/scaffold.py", kind, name)
    run_to_success(copy, "-m", "mypy")


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("loss", "forward_kl", "expected a name that isn't in use, found it in distill/losses/logits.py"),
        ("stage", "teacher", "expected a name that isn't in use"),
        ("task", "Intent", "expected a lower-case Python identifier"),
        ("export", "class", "expected a lower-case Python identifier"),
    ],
)
def test_a_name_that_cannot_be_used_is_rejected_and_nothing_is_written(kind, name, message, copy):
    before = {file: file.read_bytes() for file in copy.rglob("*.py")}
    done = run_python(copy, "tools/scaffold.py", kind, name)
    assert done.returncode == 2
    assert message in done.stderr
    assert "nothing was written" in done.stderr
    assert {file: file.read_bytes() for file in copy.rglob("*.py")} == before
