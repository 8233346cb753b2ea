"""`make quick` runs the unit tests of the packages that changed, and ends with the code of what fails."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from support.checkout_files import run_git
from support.commands import ROOT

SCRIPT = ROOT / "tools" / "quick.py"


@pytest.fixture(scope="module")
def quick():
    spec = spec_from_file_location("quick", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_changed_module_is_tested_by_the_tests_of_its_package(quick):
    tests = quick.select_tests(["distill/losses/logits.py"])
    assert "tests/unit/distill/losses/test_losses.py" in tests
    assert "tests/unit/test_package_boundaries.py" in tests
    assert not [name for name in tests if "compress" in name]


def test_a_package_without_tests_is_tested_by_those_of_its_parent(quick):
    assert "tests/unit/distill/data/test_data.py" in quick.select_tests(["distill/data/sources/tables.py"])


def test_a_changed_test_is_run_itself(quick):
    assert quick.select_tests(["tests/unit/distill/data/test_data.py", "README.md"]) == [
        "tests/unit/distill/data/test_data.py"
    ]


@pytest.fixture
def repository(tmp_path, quick, monkeypatch):
    run_git(tmp_path, "init")
    (tmp_path / "old.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-m", "first")
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    return tmp_path


def test_changed_and_new_files_are_found_and_ignored_ones_left_out(repository, quick):
    assert quick.list_changes("HEAD") == []
    (repository / "old.py").write_text("x = 2\n")
    (repository / "new.py").write_text("y = 1\n")
    (repository / "ignored.py").write_text("z = 1\n")
    assert quick.list_changes("HEAD") == ["new.py", "old.py"]


def test_a_failing_check_ends_with_its_code(repository, quick, monkeypatch, capfd):
    (repository / "new.py").write_text("import os\n")  # unused
    monkeypatch.setattr(sys, "argv", ["quick.py"])
    with pytest.raises(SystemExit) as exit_error:
        quick.main()
    assert exit_error.value.code == 1
    assert "F401" in capfd.readouterr().out
