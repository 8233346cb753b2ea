"""Handling of SIGTERM and Ctrl-C: a command ends at once, or after a checkpoint if it is training.

It prints one line and exits with the signal's exit code. All complete files on disk survive an end at any moment, so
nothing is unwound: a thread receives the signals, even while the main thread is busy, ends the child processes, and
then this process.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from compress.subprocesses import end_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NAMES = {signal.SIGINT: "Ctrl-C (SIGINT)"}
LAUNCHED = "STILLROOM_LAUNCHED"  # set in processes that a Stillroom command started, to the command's process id
REPEAT_SECONDS = 0.2  # `timeout` signals both the command and its group; this counts as one request
PARK_SECONDS = 0.2  # time for the main thread to park
EXIT_SECONDS = 10.0  # time limit for libraries to finish at exit
SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide the cursor


class StopRequested(BaseException):
    """Raised to stop the command; everything needed to resume is on disk."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = signal.Signals(number)


class SignalWatch:
    """A thread that receives the signals that request a stop of this process.

    `requested` is the first of them. While the stop is deferred, the process continues until it calls
    `raise_if_requested`.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.notify: Callable[[signal.Signals], None] | None = None  # called once, if the stop is deferred
        self.is_launched = is_launched()
        self.prints = not self.is_launched and os.environ.get("RANK", "0") == "0"
        self.is_parked = False
        self._is_deferred = self._is_ending = False
        self._since = 0.0
        self._lock = threading.Lock()
        self._former_handlers = [signal.getsignal(number) for number in SIGNALS]
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self.install_handlers()
        threading.Thread(target=self._read_signals, args=(reading,), name="stops", daemon=True).start()

    def install_handlers(self) -> None:
        """Installs the handlers, replacing those of libraries or of a shell without job control."""
        for number in SIGNALS:
            signal.signal(number, _park_main_thread)

    def park(self) -> None:
        """Blocks the main thread of a process that is ending."""
        self.is_parked = True
        while self._is_ending:
            time.sleep(PARK_SECONDS)
        self.is_parked = False

    def set_deferred(self, deferred: bool) -> None:
        """Sets whether the process continues after a stop request until it asks for it."""
        with self._lock:
            self._is_deferred = deferred

    def close(self) -> None:
        """Restores the former handlers and ends the thread."""
        for number, handler in zip(SIGNALS, self._former_handlers, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(-1)
        os.close(self._writing)

    def _read_signals(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._receive(signal.Signals(number))
        os.close(reading)

    def _receive(self, number: signal.Signals) -> None:
        with self._lock:
            first = self.requested is None
            if first:
                self.requested, self._since = number, time.monotonic()
            elif time.monotonic() - self._since < REPEAT_SECONDS or self.is_launched:
                return  # a launched process that doesn't stop is ended by its launcher
            waits = first and self._is_deferred
            self._is_ending = not waits
        if waits and self.notify is not None:
            with suppress(RuntimeError):  # the store disappears with the process that hosts it
                self.notify(number)
        if not waits:
            _end_process(number, self)


_watch: SignalWatch | None = None


def is_launched() -> bool:
    """Returns whether a Stillroom command started this process, and will end it if another process fails."""
    return LAUNCHED in os.environ


def watch_process() -> None:
    """Watches this process for signals until it ends.

    A process that was started by a Stillroom command ends together with that command.
    """
    global _watch
    if _watch is None:
        _watch = SignalWatch()
        os.register_at_fork(after_in_child=_reset_after_fork)
    if is_launched():
        end_with_parent(int(os.environ[LAUNCHED]))


@contextmanager
def watch_signals() -> Iterator[None]:
    """Watches the process during the block; a `StopRequested` that leaves the block exits with its exit code."""
    global _watch
    is_owner = _watch is None and threading.current_thread() is threading.main_thread()
    if is_owner:
        _watch = SignalWatch()
    try:
        yield
    except StopRequested as stop:
        if _watch is not None and _watch.prints:
            _print_stop(stop.number)
        _exit_within_limit(128 + stop.number)
    finally:
        if _watch is not None:
            _watch.park()
        if is_owner and _watch is not None:
            _watch.close()
            _watch = None


def requested_signal() -> signal.Signals | None:
    """Returns the signal that requested a stop of this process; None if there was none."""
    return _watch.requested if _watch is not None else None


def defer_stop(notify: Callable[[signal.Signals], None] | None = None) -> None:
    """Defers stops to the next `raise_if_requested`; a second signal still ends the process at once.

    `notify` is called from another thread as soon as a stop is requested.
    """
    if _watch is not None:
        _watch.install_handlers()  # Lightning and other libraries install their own handlers
        _watch.notify = notify
        _watch.set_deferred(True)


def allow_stop() -> None:
    """Makes stops end the process at once again.

    A stop that was requested in the meantime is left to `raise_if_requested`.
    """
    if _watch is not None:
        _watch.set_deferred(False)


def raise_if_requested() -> None:
    """Raises the stop that was requested, if any.

    Raises:
        StopRequested: A stop was requested.
    """
    number = requested_signal()
    if number is not None:
        raise StopRequested(number)


def list_children(root: int) -> list[int]:
    """Returns the direct child processes of `root`."""
    return [process for process, parent in _read_parents().items() if parent == root]


def list_descendants(root: int) -> list[int]:
    """Returns all direct and indirect child processes of `root`."""
    parents = _read_parents()
    descendants: list[int] = []
    level = [root]
    while level:
        level = [process for process, parent in parents.items() if parent in level]
        descendants += level
    return descendants


def _park_main_thread(number: int, frame: object) -> None:
    """Blocks the main thread, as a signal handler, until the watching thread has decided what to do.

    Otherwise the main thread would treat the end of a child process that it waits for as a failure.
    """
    if _watch is not None:
        time.sleep(PARK_SECONDS)
        _watch.park()


def _reset_after_fork() -> None:
    """Restores the default signal handlers in a forked process, whose parent ends it when it is stopped itself."""
    global _watch
    if _watch is not None:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _watch = None


def _end_process(number: int, ending: SignalWatch) -> NoReturn:
    """Ends all child processes and this process, regardless of what they are doing."""
    until = time.monotonic() + 2 * PARK_SECONDS
    while not ending.is_parked and time.monotonic() < until:
        time.sleep(PARK_SECONDS / 20)
    for _ in range(2):  # a child may be starting another process
        for process in list_descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
    if sys.stdout is not None and sys.stdout.isatty():
        with suppress(OSError):
            os.write(1, SHOW_CURSOR)
    if ending.prints:
        _print_stop(number)
    os._exit(128 + number)


def _exit_within_limit(code: int) -> NoReturn:
    """Exits with a time limit for libraries that hang at exit."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, [code])
    timer.daemon = True
    timer.start()
    sys.exit(code)


def _print_stop(number: int) -> None:
    """Writes the message directly to the terminal, because the main thread may hold the stream's lock."""
    name = _NAMES.get(signal.Signals(number), signal.Signals(number).name)
    message = f"stopped by {name}: finished work is kept; run the same command again to resume\n"
    with suppress(OSError):
        os.write(2, (f"\n{message}" if os.isatty(2) else message).encode())  # a library's bar may be on the line


def _read_parents() -> dict[int, int]:
    """Returns process id -> parent id for all processes on this machine, except zombies."""
    if Path("/proc/self/stat").exists():
        return dict(pair for pair in map(_read_stat, Path("/proc").glob("[0-9]*/stat")) if pair is not None)
    command = ["ps", "-A", "-o", "pid=,ppid="]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603 - fixed words
    pairs = (line.split() for line in listing.splitlines())
    return {int(process): int(parent) for process, parent in pairs}


def _read_stat(file: Path) -> tuple[int, int] | None:
    """Returns (process id, parent id) from a process's `stat` file; None if it has ended."""
    try:
        text = file.read_text()
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]  # the process name before it may contain any character
    return None if state == "Z" else (int(file.parent.name), int(parent))
