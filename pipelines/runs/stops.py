"""SIGTERM and Ctrl-C: a command ends at once, or after a checkpoint where it trains, with one line and its exit code.

What is complete on disk survives an end at any moment, so nothing is unwound: a thread reads the signals, whatever the
main thread is busy with, ends the processes that this one started, and then this one.
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
LAUNCHED = "STILLROOM_LAUNCHED"  # in processes that one of our own commands started: the id of that command's process
REPEAT_SECONDS = 0.2  # `timeout` sends its signal twice, to the command and to its group: one request
PARK_SECONDS = 0.2  # for the main thread to stand still
EXIT_SECONDS = 10.0  # for libraries to finish their work at exit
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class StopRequested(BaseException):
    """The command stops here: all that it needs to go on is on disk."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = signal.Signals(number)


class Watch:
    """The signals that ask this process to stop.

    `requested` is the first of them. While the stop is held, the process goes on until it calls `check`.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.held = False
        self.ending = self.parked = False
        self.launched = is_launched()
        self.speaks = not self.launched and os.environ.get("RANK", "0") == "0"
        self.notify: Callable[[signal.Signals], None] | None = None  # called once, where a stop is held
        self.since = 0.0
        self.lock = threading.Lock()
        self.before = [signal.getsignal(number) for number in SIGNALS]
        reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        self.install()
        threading.Thread(target=self.read, args=(reading,), name="stops", daemon=True).start()

    def install(self) -> None:
        """Takes the signals, also where a shell without job control, or a library, has set something else."""
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
                return  # a launched process that is in the way is ended by its launcher
            waits = first and self.held
            self.ending = not waits
        if waits and self.notify is not None:
            with suppress(RuntimeError):  # the store goes with the process that keeps it
                self.notify(number)
        if not waits:
            end_at_once(number, self)

    def park(self) -> None:
        """Keeps the main thread from going on in a process that ends."""
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
    """Whether a command of ours started this process, and ends it where another fails."""
    return LAUNCHED in os.environ


def received(number: int, frame: object) -> None:
    """In the main thread, which stands still until the thread that reads the signals has decided: it would take the
    end of a process that it waits for as a failure.
    """
    if watch is not None:
        time.sleep(PARK_SECONDS)
        watch.park()


def begin() -> None:
    """Watches this process until it ends; a process that a command of ours started ends with that command."""
    global watch
    if watch is None:
        watch = Watch()
        os.register_at_fork(after_in_child=forget)
    if is_launched():
        end_with_parent(int(os.environ[LAUNCHED]))


def forget() -> None:
    """In a forked process the signals have their usual effect; its parent ends it where it is stopped itself."""
    global watch
    if watch is not None:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        watch = None


@contextmanager
def watched() -> Iterator[None]:
    """Watches the process while the block runs; a `StopRequested` that leaves the block ends it with its exit code."""
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
    """The signal that asked this process to stop."""
    return watch.requested if watch is not None else None


def hold(notify: Callable[[signal.Signals], None] | None = None) -> None:
    """From here a stop waits for `check`; a second signal ends the process at once all the same.

    `notify` is called as soon as one is requested, on another thread.
    """
    if watch is not None:
        watch.install()  # Lightning and others set their own when they start
        watch.notify = notify
        watch.hold(True)


def release() -> None:
    """From here a stop ends the process at once again; one that was requested meanwhile is left to `check`."""
    if watch is not None:
        watch.hold(False)


def check() -> None:
    """
    Raises:
        StopRequested: A stop was requested.
    """
    number = requested()
    if number is not None:
        raise StopRequested(number)


def end_at_once(number: int, ending: Watch) -> NoReturn:
    """Ends the processes that this one started, and this one, whatever it is doing."""
    until = time.monotonic() + 2 * PARK_SECONDS
    while not ending.parked and time.monotonic() < until:
        time.sleep(PARK_SECONDS / 20)
    for _ in range(2):  # one may be starting another
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
    """Exits; what hangs while it does is cut short."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, [code])
    timer.daemon = True
    timer.start()
    sys.exit(code)


def say(number: int) -> None:
    """Straight to the terminal: the main thread may hold the lock of the stream."""
    name = NAMES.get(signal.Signals(number), signal.Signals(number).name)
    with suppress(OSError):
        os.write(2, f"stopped by {name}: what is complete is kept; the same command goes on from here\n".encode())


def descendants(root: int) -> list[int]:
    """The processes that `root` started, and those that these started."""
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
    """Parent of each process of this machine, without those that have ended and aren't collected."""
    if Path("/proc/self/stat").exists():
        return dict(pair for pair in map(stat_of, Path("/proc").glob("[0-9]*/stat")) if pair is not None)
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    return dict(numbers(line.split()) for line in listed.splitlines())


def stat_of(file: Path) -> tuple[int, int] | None:
    try:
        text = file.read_text()
    except OSError:  # ended meanwhile
        return None
    state, parent = text.rpartition(")")[2].split()[:2]  # the name before it may hold anything
    return None if state == "Z" else (int(file.parent.name), int(parent))


def numbers(words: Sequence[str]) -> tuple[int, int]:
    return int(words[0]), int(words[1])
