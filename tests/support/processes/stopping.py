"""Starts commands, sends them signals at defined moments, and checks how they end."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.runs.manifest import SCRATCH
from support.commands import start

SECONDS = 240.0
SECONDS_TO_END = 10.0  # of a process whose parent has ended


class Running:
    """A running command; `lines` collects its output."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.lines = process, list[str]()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    @classmethod
    def of(cls, module: str, arguments: Sequence[str], *, fresh: bool = False) -> "Running":
        return cls(start(module, arguments, fresh=fresh))

    def read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, condition: Callable[[], object], what: str, *, alive: bool = True) -> None:
        """Waits until the condition holds; fails if the command ends earlier, unless `alive` is false."""
        end = time.monotonic() + SECONDS
        while not condition():
            assert not alive or self.process.poll() is None, f"it ended before {what}: {self.output}"
            assert time.monotonic() < end, f"no {what} within {SECONDS:.0f} s: {self.output}"
            time.sleep(0.02)

    def wait_for_line(self, text: str) -> None:
        self.wait_for(lambda: text in self.output, text)

    def wait_until_watched(self) -> None:
        """Waits until the command handles SIGTERM, which it does before its long imports."""
        self.wait_for(lambda: handles_signal(self.process.pid, signal.SIGTERM), "handler of SIGTERM")

    def wait_for_child(self, text: str) -> int:
        self.wait_for(lambda: self.children(text), f"child process {text}")
        return self.children(text)[0]

    def children(self, text: str = "") -> list[int]:
        return [pid for pid in descendants(self.process.pid) if text in command_line(pid)]

    def end(self) -> int:
        """Waits until the command has ended and its output is closed, and returns the exit code."""
        try:
            self.process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.reader.join(SECONDS)
        return self.process.returncode

    def stop(self, number: int) -> int:
        """Sends a signal and returns the exit code; checks that the processes started by the command end too."""
        started = self.children()
        self.process.send_signal(number)
        code = self.end()
        end = time.monotonic() + SECONDS_TO_END
        while left := [pid for pid in started if is_running(pid)]:
            assert time.monotonic() < end, f"processes are left: {[command_line(pid) for pid in left]}"
            time.sleep(0.05)
        return code


def wait_for_checkpoint(output: Path) -> None:
    """Returns when the student's training has written a checkpoint; whoever runs it may be anywhere."""
    end = time.monotonic() + SECONDS
    while not any(output.glob(f"distill/*/{SCRATCH}/checkpoints/*.ckpt")):
        assert time.monotonic() < end, f"no checkpoint within {SECONDS:.0f} s"
        time.sleep(0.02)


def assert_stopped(running: Running, name: str) -> None:
    """Checks that the last line, and only this one, reports the stop and how to resume, without a traceback."""
    assert "Traceback" not in running.output
    assert "error: " not in running.output
    assert running.output.count("stopped by ") == 1
    last = running.lines[-1]
    assert last == f"stopped by {name}: finished work is kept; run the same command again to resume\n"


def descendants(root: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(parent) for pid, parent in (line.split() for line in listed.splitlines())}
    pids, level = list[int](), [root]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        pids += level
    return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    """Returns a process's command line, and its name: a forked process ends that with the end of its module's name."""
    try:
        files = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "comm")]
    except OSError:
        return ""
    return b" ".join(files).replace(b"\0", b" ").decode()


def handles_signal(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
