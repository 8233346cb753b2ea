"""Timing in a fresh process: in the process that trained them, small models are up to a third slower.

The fresh process runs this file as `python -m compress.measure.process DESCRIPTOR`, with the file descriptor of its end
of a connection. It loads only what the models need.
"""

import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeAlias

import numpy as np

from compress.errors import TimingError
from compress.measure.latency import Name, Runner, ignore_calls, time_rounds
from compress.measure.load import ProcessorSeconds, start_counting
from compress.subprocesses import end_with_parent, signal_name

# Opens a model; it is pickled, so it must be a function of a module, or a functools.partial of one.
Opener: TypeAlias = Callable[[], Runner[Any]]
MAX_OPENING = 0.5  # seconds spent on opening models per second of timing, beyond which they stay open
OPEN, TIME = "open", "time"  # requests
OPENED, CALLS, TIMES, FAILED = "opened", "calls", "times", "failed"  # kinds of answers
# Numbers of threads that numpy's libraries read when they are loaded.
NUMPY_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class TimingProcess(Generic[Name]):
    """A fresh process with open models.

    Args:
        connection: Connection to the process.
        process: The process.
    """

    def __init__(self, connection: Connection, process: "subprocess.Popen[bytes]"):
        self.connection, self.process = connection, process
        self.processors = ProcessorSeconds()  # while models were timed
        self.opening = self.timing = 0.0  # seconds

    def time_rounds(
        self,
        inputs: Mapping[Name, Sequence[Any]],
        *,
        rounds: int,
        warmup: int = 1,
        on_calls: Callable[[int], None] = ignore_calls,
    ) -> dict[Name, np.ndarray]:
        """Returns what `compress.measure.latency.time_rounds` measures in the process, for the models of `inputs`.

        Raises:
            TimingError: A model can't be opened or fails, or the process is killed.
        """
        start = time.perf_counter()
        self.send((TIME, dict(inputs), rounds, warmup))
        while (received := self.receive())[0] == CALLS:
            on_calls(received[1])
        times, processors = received[1]
        self.processors += processors
        self.timing += time.perf_counter() - start
        return times  # type: ignore[no-any-return]

    def open_models(self) -> None:
        """Opens all models, after closing those that are open.

        Raises:
            TimingError: A model can't be opened, or the process is killed.
        """
        start = time.perf_counter()
        self.send((OPEN,))
        self.receive()
        self.opening += time.perf_counter() - start

    def reopen_models(self) -> None:
        """Opens all models again, unless opening has taken more than MAX_OPENING of the time of timing.

        Where a model's weights lie in memory differs from one opening to the next, and with it the latency: that of a
        model of 92 MB by up to 8 %.

        Raises:
            TimingError: A model can't be opened, or the process is killed.
        """
        if self.opening <= MAX_OPENING * self.timing:
            self.open_models()

    def send(self, request: object) -> None:
        """Sends a request to the process."""
        with self._explain_end():
            self.connection.send(request)

    def receive(self) -> tuple[str, Any]:
        """Returns the next kind of answer, and its value.

        Raises:
            TimingError: A model can't be opened or fails, or the process is killed.
        """
        with self._explain_end():
            kind, value = self.connection.recv()
        if kind == FAILED:
            raise TimingError(f"timing: models can't be run in a fresh process, so their latency is unknown:\n{value}")
        return kind, value

    @contextmanager
    def _explain_end(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            raise TimingError(
                f"timing: the process that timed models {self._describe_end()}, so their latency is unknown"
            ) from None

    def _describe_end(self) -> str:
        code = self.process.wait()
        if code < 0:
            return f"was killed by {signal_name(-code)}; run the same command again, with more memory if it ran out"
        return f"ended with exit code {code}; its output is above"


@contextmanager
def open_timing_process(openers: Mapping[Name, Opener], threads: int) -> Iterator[TimingProcess[Name]]:
    """Opens models in a fresh process, which ends with the block.

    Args:
        openers: Name -> function that opens its model.
        threads: Threads of PyTorch and numpy in the process, 0: their own default; models of other runtimes must be
            opened with the same number.

    Raises:
        TimingError: A model can't be opened, or the process is killed.
    """
    connection, other = Pipe()
    command = [sys.executable, "-m", __name__, str(other.fileno())]
    environment = os.environ | (dict.fromkeys(NUMPY_THREADS, str(threads)) if threads else {})
    with (
        connection,
        subprocess.Popen(command, pass_fds=[other.fileno()], env=environment) as process,  # noqa: S603 - this module
    ):
        other.close()
        try:
            timing = TimingProcess[Name](connection, process)
            timing.send((os.getpid(), dict(openers), threads))
            timing.open_models()
            yield timing
        finally:
            process.kill()


def main(descriptor: str) -> None:
    """Opens the models that the parent names, and times them on the inputs that it sends, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    with Connection(int(descriptor)) as connection:
        try:
            parent, openers, threads = connection.recv()
            end_with_parent(parent)
            serve_requests(connection, openers, threads)
        except EOFError:
            return
        except Exception:  # noqa: BLE001 - the parent reports it
            connection.send((FAILED, traceback.format_exc()))


def serve_requests(connection: Connection, openers: Mapping[Any, Opener], threads: int) -> None:
    """Opens models and times them, as often as requested.

    Raises:
        EOFError: The connection ended.
    """
    runners: dict[Any, Runner[Any]] = {}
    while True:
        request, *arguments = connection.recv()
        if request == OPEN:
            runners.clear()  # first, so that memory doesn't hold them twice
            gc.collect()
            runners |= {name: opener() for name, opener in openers.items()}
            connection.send((OPENED, None))
        else:
            inputs, rounds, warmup = arguments
            on_calls, count_seconds = partial(send_calls, connection), start_counting()
            times = time_rounds(runners, inputs, rounds=rounds, warmup=warmup, threads=threads, on_calls=on_calls)
            connection.send((TIMES, (times, count_seconds())))


def send_calls(connection: Connection, count: int) -> None:
    """Sends the number of calls that were made."""
    connection.send((CALLS, count))


if __name__ == "__main__":
    main(*sys.argv[1:])
