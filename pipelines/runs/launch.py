"""Starts a command again as several processes, and passes on how they end."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import uuid4

from compress.subprocesses import signal_name
from pipelines.runs import stops
from pipelines.runs.console import fail
from pipelines.settings.this_machine import cores

STOPPED = {128 + number for number in stops.SIGNALS}
POLL_SECONDS = 0.1
STOP_SECONDS = 24 * 3600  # for a checkpoint: who can't wait presses Ctrl-C again


def launch(module: str, argv: Sequence[str], processes: int, restarts: int = 0) -> None:
    """Runs `python -m module argv` in `processes` processes on this machine; ends this one with the exit code of the
    first of them that failed.

    When one of them dies, all are started again, at most `restarts` times: stages and checkpoints go on where they
    stood. A stop that is requested, of this process or of one of them, stops them all for good. Each process gets its
    share of the cores.

    Raises:
        StopRequested: They were stopped.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ[stops.LAUNCHED] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # how they ended is said below
    stops.hold(lambda number: threading.Thread(target=stop_processes, daemon=True).start())
    for left in range(restarts, -1, -1):
        try:
            run_processes(module, argv, processes)
            break
        except SignalException as stopped:  # SIGHUP and SIGQUIT
            sys.exit(128 + stopped.sigval)
        except ChildFailedError as error:
            stops.check()
            rank, failure = error.get_first_failure()
            end_as(rank, failure.exitcode, processes, left)
    stops.release()
    stops.check()


def run_processes(module: str, argv: Sequence[str], processes: int) -> None:
    """
    Raises:
        ChildFailedError: One of them failed; the others were ended.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # it would also start again what was stopped on purpose
        monitor_interval=0.2,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    elastic_launch(config, sys.executable)("-m", module, *argv)


def stop_processes() -> None:
    """Passes a stop on to every process that this one has started, and to those that it is still starting."""
    asked: set[int] = set()
    while True:
        for process in stops.children(os.getpid()):
            if process not in asked:
                asked.add(process)
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process, signal.SIGTERM)  # SIGINT would leave a traceback of one that has just started
        time.sleep(POLL_SECONDS)


def end_as(rank: int, code: int, processes: int, left: int) -> None:
    """Ends this process as the process `rank` did, or returns where it is to be started again.

    Raises:
        StopRequested: It was stopped on purpose.
    """
    if code in STOPPED or -code in stops.SIGNALS:
        raise stops.StopRequested(code - 128 if code > 0 else -code)
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    if left:
        print(f"process {rank} of {processes} {how}: started again, {left} restarts left", file=sys.stderr)
        return
    if code < 0:  # it couldn't say so itself
        fail(f"process {rank} of {processes} {how}; the same command goes on from the last checkpoint")
    sys.exit(128 - code if code < 0 else code)
