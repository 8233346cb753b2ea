"""Starts the processes of a student's replicas, restarts those that die, and waits for them."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from compress.subprocesses import signal_name
from distill.errors import InputError
from pipelines.runs import stops
from pipelines.runs.cli import exit_on_invalid_input
from pipelines.runs.console import Console
from pipelines.runs.launch import STOP_CODES, THREADS, set_thread_share
from pipelines.runs.replicas.replica import Outcome, Replica, name_folder, read_outcomes
from pipelines.settings.commands.distill import MachineConfig

WATCH_SECONDS = 0.05
END_SECONDS = 30.0  # in which replicas that are asked to stop do so
HEARTBEAT_MS = 2000  # without a sign of life, after which a replica is left out

TrainReplica = Callable[[Replica], None]


class Supervisor:
    """The processes of the replicas.

    Args:
        train: Trains a replica; called in its process, so that it has to be picklable.
        shared: Folder in which the replicas have theirs.
        machine: The number of replicas, and how often dead ones are started again, over all of them.
        console: Prints failures and restarts.
        lighthouse: Address at which replicas that are averaged find each other; empty for others.
        preload: Modules that `train` needs; imported once for all replicas and their restarts.
    """

    def __init__(
        self,
        train: TrainReplica,
        shared: Path,
        machine: MachineConfig,
        console: Console,
        *,
        lighthouse: str = "",
        preload: Sequence[str] = (),
    ):
        self.train, self.shared, self.console, self.lighthouse = train, shared, console, lighthouse
        self.count, self.restarts = machine.devices, machine.restarts
        self.context = get_context("forkserver")  # a process that has imported all of it, so that restarts are quick
        self.context.set_forkserver_preload([*preload])
        self.go = self.context.Event()
        self.ready = [self.context.Event() for _ in range(self.count)]
        self.running: dict[int, ForkServerProcess] = {}

    def run(self) -> dict[int, Outcome]:
        """Returns the outcomes of the replicas that finished.

        Raises:
            InputError: All replicas died.
            StopRequested: A stop was requested.
        """
        with share_threads(self.count):
            for index in range(self.count):
                self._start(index, is_restarted=False)
            stops.defer_stop()
            try:
                while self.running:
                    self._check_stop()
                    self._look_after_all()
                    time.sleep(WATCH_SECONDS)
            finally:
                self._end_all()
                stops.allow_stop()
        stops.raise_if_requested()
        outcomes = read_outcomes(self.shared, self.count)
        if not outcomes:
            raise InputError(
                f"all {self.count} replicas of the student died; run the same command again to resume from their "
                "checkpoints"
            )
        return outcomes

    def _start(self, index: int, *, is_restarted: bool) -> None:
        replica = Replica(
            index, self.count, name_folder(self.shared, index), self.shared, self.lighthouse, is_restarted,
            self.ready[index], self.go,
        )  # fmt: skip
        process = self.context.Process(target=run_replica, args=(self.train, replica), name=replica.name)
        process.start()
        self.running[index] = process

    def _look_after_all(self) -> None:
        if not self.go.is_set() and all(self.ready[index].is_set() for index in self.running):
            self.go.set()
        for index, process in list(self.running.items()):
            if process.exitcode is not None:
                del self.running[index]
                self._handle_end(index, process.exitcode)

    def _handle_end(self, index: int, code: int) -> None:
        if code == 0:
            return
        if code in STOP_CODES or -code in stops.SIGNALS:
            raise stops.StopRequested(code - 128 if code > 0 else -code)
        if code == 2:  # a message was printed
            sys.exit(2)
        cause = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        is_over = bool(read_outcomes(self.shared, self.count))
        if self.restarts and not is_over:
            self.restarts -= 1
            self.console.say(f"  replica {index} {cause}: started again, {self.restarts} restarts left")
            self._start(index, is_restarted=bool(self.running))
        else:
            left = len(self.running)
            self.console.say(f"  replica {index} {cause}" + (f": the other {left} go on without it" if left else ""))

    def _check_stop(self) -> None:
        number = stops.requested_signal()
        if number is not None:
            raise stops.StopRequested(number)

    def _end_all(self) -> None:
        for process in self.running.values():
            process.terminate()
        until = time.monotonic() + END_SECONDS
        for process in self.running.values():
            process.join(max(0.0, until - time.monotonic()))
            process.kill()


def run_replica(train: TrainReplica, replica: Replica) -> None:
    """Runs in a replica's process: trains it, and ends together with the process that started it."""
    os.environ[stops.LAUNCHED] = str(os.getppid())  # the server of processes, which ends with the command
    stops.watch_process()
    with exit_on_invalid_input(), stops.watch_signals():
        train(replica)


@contextmanager
def share_threads(count: int) -> Iterator[None]:
    """Gives the processes that are started in the block their share of the cores, unless OMP_NUM_THREADS says it."""
    is_given = THREADS in os.environ
    set_thread_share(count)
    try:
        yield
    finally:
        if not is_given:
            del os.environ[THREADS]


@contextmanager
def open_lighthouse(join_seconds: float) -> Iterator[str]:
    """Yields the address of a torchft lighthouse, at which replicas find each other.

    Args:
        join_seconds: Seconds that the others wait for a replica that is alive but late.
    """
    os.environ.setdefault("RUST_LOG", "error")  # otherwise torchft prints every averaging, of the replicas too
    from torchft.coordination import LighthouseServer

    server: Any = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=int(1000 * join_seconds), quorum_tick_ms=50,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )  # fmt: skip
    try:
        yield re.sub(r"http://[^:]*:", "http://127.0.0.1:", server.address())
    finally:
        server.shutdown()
