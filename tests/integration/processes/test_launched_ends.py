"""How a command that starts several processes ends when it is stopped or when one of its processes fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import ROOT
from support.processes.stopping import Running, assert_stopped

LAUNCH = "import sys; from pipelines.runs import cli; from pipelines.runs.launch import launch_processes; "
LAUNCH += "cli.run(lambda argv: launch_processes('worker', [], 2, int(argv[0])))"
WORKER = """
import os, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
folder = Path(__file__).parent
(folder / f"{rank}.pid").write_text(str(os.getpid()))
with (folder / f"{rank}.starts").open("a") as file:
    file.write("x")
WORK
time.sleep(100)
"""


def start_processes(folder: Path, restarts: int = 0, work: str = "") -> Running:
    """Starts two processes that execute `work` and then sleep."""
    (folder / "worker.py").write_text(WORKER.replace("WORK", work))
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    return Running(
        subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(restarts)],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
    )  # fmt: skip


def pid_of(running: Running, folder: Path, rank: int) -> int:
    file = folder / f"{rank}.pid"
    running.wait_for(lambda: file.exists() and file.read_text(), f"process {rank}")
    return int(file.read_text())


def read_starts(folder: Path) -> list[str]:
    return [(folder / f"{rank}.starts").read_text() for rank in range(2)]


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGTERM, "SIGTERM", 143),
        pytest.param(signal.SIGINT, "Ctrl-C (SIGINT)", 130, marks=pytest.mark.slow),
    ],
)
def test_a_stop_signal_ends_all_processes_with_one_line_and_no_restart(number, name, code, tmp_path):
    running = start_processes(tmp_path, restarts=3)
    for rank in range(2):
        pid_of(running, tmp_path, rank)
    assert running.stop(number) == code
    assert_stopped(running, name)
    assert len(running.lines) == 1
    assert read_starts(tmp_path) == ["x", "x"]


@pytest.mark.slow
def test_stopping_one_process_stops_all_without_a_restart(tmp_path):
    running = start_processes(tmp_path, restarts=3)
    first = pid_of(running, tmp_path, 0)
    os.kill(pid_of(running, tmp_path, 1), signal.SIGTERM)
    assert running.end() == 143
    assert_stopped(running, "SIGTERM")
    assert read_starts(tmp_path) == ["x", "x"]
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.slow
def test_a_killed_process_is_restarted_until_no_restarts_are_left(tmp_path):
    running = start_processes(tmp_path, restarts=1)
    pid_of(running, tmp_path, 0)
    first = pid_of(running, tmp_path, 1)
    os.kill(first, signal.SIGKILL)
    running.wait_for(lambda: read_starts(tmp_path) == ["xx", "xx"], "second start")
    running.wait_for(lambda: pid_of(running, tmp_path, 1) != first, "second process 1")
    os.kill(pid_of(running, tmp_path, 1), signal.SIGKILL)
    assert running.end() == 137
    assert running.lines == [
        "process 1 of 2 was ended by SIGKILL: restarting all processes, 1 restart left\n",
        "error: process 1 of 2 was ended by SIGKILL; run the same command again to resume from the checkpoint\n",
    ]


def test_the_failing_process_determines_the_last_line_and_exit_code(tmp_path):
    work = "if rank == 1: time.sleep(0.5); print('error: mine', file=sys.stderr); sys.exit(2)"
    running = start_processes(tmp_path, work=work)
    assert running.end() == 2
    assert running.lines == ["error: mine\n"]
