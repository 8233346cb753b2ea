"""Runs a documented command in a shell, in a working directory that looks like a checkout to it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from real.documents import ROOT


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    line: str
    code: int
    seconds: float
    output: str


def execute(line: str, folder: Path, limit: float, *, written: str | None = None) -> Done:
    """Runs a command on one thread, offline, and ends every process that it has started.

    Args:
        line: The command that runs.
        folder: Working directory.
        limit: Seconds until the command is killed.
        written: The command as documented, if another one runs in its stead.
    """
    started = time.monotonic()
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HOME": str(folder / ".cache")}
    process = subprocess.Popen(
        ["bash", "-c", line], cwd=folder, env=os.environ | variables, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the command may have started other processes
    return Done(written or line, process.returncode, round(time.monotonic() - started, 1), output)
