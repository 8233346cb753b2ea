"""A wheel of this checkout, installed in a virtual environment, works from an empty folder with its recipes."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.checkout_files import copy_checkout
from support.commands import small_run
from support.services.environments import run_or_skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with the libraries of the running one."""
    folder = tmp_path_factory.mktemp("installed")
    source = copy_checkout(folder / "source")
    run_or_skip([sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, source])  # downloads setuptools
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = folder.glob("*.whl")
    install = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, env=own_environment(), check=True)
    return folder / "venv"


def own_environment() -> dict[str, str]:
    """Returns the environment without PYTHONPATH, through which the checkout would count as installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(environment: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [environment / "bin" / arguments[0], *arguments[1:]],
        cwd=folder,
        env=own_environment() | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def empty_folder(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_the_installed_packages_are_used_and_not_the_checkout(environment, empty_folder):
    done = run(environment, empty_folder, "python", "-c", "import pipelines; print(pipelines.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(environment)


@pytest.mark.parametrize("command", ["cache", "distill", "evaluate", "export", "prune", "quantize", "report"])
def test_every_command_prints_its_help(command, environment, empty_folder):
    done = run(environment, empty_folder, "stillroom", command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"pipelines.{command}" in done.stdout


def test_a_recipe_is_run_by_its_name(environment, empty_folder, body_folder, data_folder):
    recipe = ("--config", "recipe:demo", "--teacher_train.epochs", "1", "--epochs", "1", "--student", "layers=1")
    arguments = small_run(body_folder, data_folder, Path("run"), *recipe)
    done = run(environment, empty_folder, "stillroom", "distill", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (empty_folder / "run/student/config.json").is_file()
    assert (empty_folder / "run/report.html").is_file()
    again = run(environment, empty_folder, "stillroom", "report", "--run", "run")
    assert again.returncode == 0, again.stdout + again.stderr


def test_an_unknown_recipe_is_rejected_with_the_nearest_name(environment, empty_folder):
    done = run(environment, empty_folder, "stillroom", "distill", "--config", "recipe:prund")
    assert done.returncode == 2
    assert "did you mean recipe:pruned?" in done.stderr
