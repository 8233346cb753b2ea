"""`stillroom`: the same commands as the modules, by the script that an installation makes."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.__main__ import COMMANDS
from support.commands import ROOT


def stillroom(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines", *arguments],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_help_lists_every_command():
    shown = stillroom("--help")
    assert shown.returncode == 0
    modules = {file.stem for file in (ROOT / "pipelines").glob("*.py") if not file.stem.startswith("__")}
    assert modules == set(COMMANDS)
    assert all(f"  {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_is_that_of_its_module(name: str):
    module = [sys.executable, "-m", f"pipelines.{name}", "--help"]
    module_help = subprocess.run(module, cwd=ROOT, text=True, capture_output=True, timeout=120, check=True)
    assert stillroom(name, "--help").stdout == module_help.stdout != ""
    assert "examples:" in module_help.stdout or name == "cache"  # whose subcommands have them
    assert "Path to a configuration file" not in module_help.stdout, "a group isn't read from a file of its own"


def test_an_unknown_command_is_rejected_with_the_nearest():
    done = stillroom("distil")
    assert done.returncode == 2
    assert "found 'distil'; did you mean 'distill'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_options_end_with_code_2_and_one_message(tmp_path: Path):
    done = stillroom("distill", "--teacher", str(tmp_path / "none"), "--data", "x", "--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1


def test_the_installed_script_is_the_module():
    script = Path(sys.executable).parent / "stillroom"
    if not script.exists():
        pytest.skip("this environment was installed before there was a script")
    done = subprocess.run([script, "--help"], text=True, capture_output=True, timeout=120, check=True)
    assert done.stdout == stillroom("--help").stdout
