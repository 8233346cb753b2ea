"""Runs the commands of pipelines: as processes, or in this process where only the message matters."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from pipelines.quantize import QUANTIZE_SHORT
from pipelines.runs import cli
from pipelines.settings.command_line import override_flags
from pipelines.settings.commands.distill import SHORT_OPTIONS
from support.processes.command_server import start_server
from support.processes.forked_process import VERIFICATION, ForkedProcess

ROOT = Path(__file__).parents[2]


class Verifying(ForkedProcess):
    modules = (VERIFICATION,)


# The least number of texts, without further ones until intervals are narrow.
QUICK_MEASUREMENT = (
    *("--measure.texts", "4", "--measure.rounds", "1", "--measure.batch", "4", "--measure.parity", "8"),
    *("--measure.seconds", "0"),
)


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command line of a process; if a flag is repeated, to override one of `small_run`, the last counts."""
    return [sys.executable, "-m", f"pipelines.{module}", *with_last_flags(module, arguments)]


def with_last_flags(module: str, arguments: Sequence[str]) -> list[str]:
    return override_flags((), arguments, QUANTIZE_SHORT if module == "quantize" else SHORT_OPTIONS)


def small_run(teacher: Path, data: Path, output: Path, *more: str) -> list[str]:
    """Returns the arguments of a distillation that takes seconds: a tiny teacher, few texts, two of four layers, a CPU.

    Flags in `more` override those of the same name.
    """
    arguments = [
        *("--teacher", str(teacher), "--data", str(data), "--output", str(output), "--student", "layers=2"),
        *("--accelerator", "cpu", "--precision", "32", "--threads", "1"),
        *("--data.max_length", "32", "--batch-size", "8", *QUICK_MEASUREMENT),
        *("--teacher_train.batch_size", "8", "--teacher_train.learning_rate", "1e-3", "--learning-rate", "1e-3"),
    ]
    return override_flags(arguments, more, SHORT_OPTIONS)


def start(module: str, arguments: Sequence[str], *, fresh: bool = False) -> subprocess.Popen:
    """Starts a command; a `fresh` one imports the libraries itself, as a user's does."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    start_process: type[subprocess.Popen] = subprocess.Popen
    if not fresh and sys.platform == "linux":
        start_process, ForkedProcess.requests = ForkedProcess, start_server()
    return start_process(
        command(module, *arguments), cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def fork_verifications(patch: pytest.MonkeyPatch) -> None:
    """Has the processes that verify exports forked, as in a forked command, where this process starts them."""
    if sys.platform == "linux":
        ForkedProcess.requests = start_server()
        patch.setattr(subprocess, "Popen", Verifying)


def run_to_success(module: str, arguments: Sequence[str], *, fresh: bool = False) -> str:
    """Runs a command that must succeed and returns its output."""
    process = start(module, arguments, fresh=fresh)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def rejection_of(
    module: ModuleType, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Runs a command that must exit with code 2 and no traceback and returns its message; flags as in `command`."""
    return rejected_as_written(
        module, with_last_flags(module.__name__.rpartition(".")[2], arguments), monkeypatch, capsys
    )


def rejected_as_written(
    module: ModuleType, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    with pytest.raises(SystemExit) as exit_error:
        cli.run(module.main)
    message = capsys.readouterr().err
    assert exit_error.value.code == 2, message
    assert "Traceback" not in message
    assert message.startswith("error: ")
    return message
