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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from compress.subprocesses import end_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NAMES = {signal.SIGINT: "Ctrl-C (SIGINT)"}
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


class Watch:
    """Receives the signals that request a stop of this process.

    `requested` is the first of them. While the stop is held, the process continues until it calls `check`.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.held = False
        self.ending = self.parked = False
        self.launched = is_launched()
        self.speaks = not self.launched and os.environ.get("RANK", "0") == "0"
        self.notify: Callable[[signal.Signals], None] | None = None  # called once, if the stop is held
        self.since = 0.0
        self.lock = threading.Lock()
        self.before = [signal.getsignal(number) for number in SIGNALS]
        reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        self.install()
        threading.Thread(target=self.read, args=(reading,), name="stops", daemon=True).start()

    def install(self) -> None:
        """Installs the handlers, replacing those of libraries or of a shell without job control."""
        for number in SIGNALS:
            signal.signal(number, received)

    def read(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in SIGNALS:
                    self.receive(signal.Signals(number))
        os.close(reading)

    def receive(self, number: signal.Signals) -> None:
        with self.lock:
            first = self.requested is None
            if first:
                self.requested, self.since = number, time.monotonic()
            elif time.monotonic() - self.since < REPEAT_SECONDS or self.launched:
                return  # a launched process that doesn't stop is ended by its launcher
            waits = first and self.held
            self.ending = not waits
        if waits and self.notify is not None:
            with suppress(RuntimeError):  # the store disappears with the process that hosts it
                self.notify(number)
        if not waits:
            end_at_once(number, self)

    def park(self) -> None:
        """Blocks the main thread of a process that is ending."""
        self.parked = True
        while self.ending:
            time.sleep(PARK_SECONDS)
        self.parked = False

    def hold(self, held: bool) -> None:
        with self.lock:
            self.held = held

    def close(self) -> None:
        for number, handler in zip(SIGNALS, self.before, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(-1)
        os.close(self.writing)


watch: Watch | None = None


def is_launched() -> bool:
    """Returns whether a Stillroom command started this process, and will end it if another process fails."""
    return LAUNCHED in os.environ


def received(number: int, frame: object) -> None:
    """Signal handler: blocks the main thread until the signal-reading thread has decided what to do.

    Otherwise the main thread would treat the end of a child process that it waits for as a failure.
    """
    if watch is not None:
        time.sleep(PARK_SECONDS)
        watch.park()


def begin() -> None:
    """Watches this process for signals until it ends.

    A process that was started by a Stillroom command ends together with that command.
    """
    global watch
    if watch is None:
        watch = Watch()
        os.register_at_fork(after_in_child=reset_after_fork)
    if is_launched():
        end_with_parent(int(os.environ[LAUNCHED]))


def reset_after_fork() -> None:
    """Restores the default signal handlers in a forked process, whose parent ends it when it is stopped itself."""
    global watch
    if watch is not None:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        watch = None


@contextmanager
def watched() -> Iterator[None]:
    """Watches the process during the block; a `StopRequested` that leaves the block exits with its exit code."""
    global watch
    own = watch is None and threading.current_thread() is threading.main_thread()
    if own:
        watch = Watch()
    try:
        yield
    except StopRequested as stop:
        if watch is not None and watch.speaks:
            say(stop.number)
        leave(128 + stop.number)
    finally:
        if watch is not None:
            watch.park()
        if own and watch is not None:
            watch.close()
            watch = None


def requested() -> signal.Signals | None:
    """Returns the signal that requested a stop of this process; None if there was none."""
    return watch.requested if watch is not None else None


def hold(notify: Callable[[signal.Signals], None] | None = None) -> None:
    """Defers stops to the next `check`; a second signal still ends the process at once.

    `notify` is called from another thread as soon as a stop is requested.
    """
    if watch is not None:
        watch.install()  # Lightning and other libraries install their own handlers
        watch.notify = notify
        watch.hold(True)


def release() -> None:
    """Makes stops end the process at once again; a stop requested in the meantime is left to `check`."""
    if watch is not None:
        watch.hold(False)


def check() -> None:
    """Raises the stop that was requested, if any.

    Raises:
        StopRequested: A stop was requested.
    """
    number = requested()
    if number is not None:
        raise StopRequested(number)


def end_at_once(number: int, ending: Watch) -> NoReturn:
    """Ends all child processes and this process, regardless of what they are doing."""
    until = time.monotonic() + 2 * PARK_SECONDS
    while not ending.parked and time.monotonic() < until:
        time.sleep(PARK_SECONDS / 20)
    for _ in range(2):  # a child may be starting another process
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
    if sys.stdout is not None and sys.stdout.isatty():
        with suppress(OSError):
            os.write(1, SHOW_CURSOR)
    if ending.speaks:
        say(number)
    os._exit(128 + number)


def leave(code: int) -> NoReturn:
    """Exits with a time limit for libraries that hang at exit."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, [code])
    timer.daemon = True
    timer.start()
    sys.exit(code)


def say(number: int) -> None:
    """Writes the message directly to the terminal, because the main thread may hold the stream's lock."""
    name = NAMES.get(signal.Signals(number), signal.Signals(number).name)
    with suppress(OSError):
        os.write(2, f"stopped by {name}: what is complete is kept; the same command goes on from here\n".encode())


def descendants(root: int) -> list[int]:
    """Returns all direct and indirect child processes of `root`."""
    parents = process_parents()
    found: list[int] = []
    level = [root]
    while level:
        level = [process for process, parent in parents.items() if parent in level]
        found += level
    return found


def children(root: int) -> list[int]:
    return [process for process, parent in process_parents().items() if parent == root]


def process_parents() -> dict[int, int]:
    """Returns process id -> parent id for all processes on this machine, except zombies."""
    if Path("/proc/self/stat").exists():
        return dict(pair for pair in map(stat_of, Path("/proc").glob("[0-9]*/stat")) if pair is not None)
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    return dict(numbers(line.split()) for line in listed.splitlines())


def stat_of(file: Path) -> tuple[int, int] | None:
    try:
        text = file.read_text()
    except OSError:  # the process has ended
        return None
    state, parent = text.rpartition(")")[2].split()[:2]  # the process name before it may contain any character
    return None if state == "Z" else (int(file.parent.name), int(parent))


def numbers(words: Sequence[str]) -> tuple[int, int]:
    return int(words[0]), int(words[1])
