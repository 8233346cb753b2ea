"""Launches a command as several processes and propagates their exit status."""

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


def launch(module: str, argv: Sequence[str], processes: int, restarts: int = 0) -> None:
    """Runs `python -m module argv` in `processes` processes on this machine.

    If a process fails for good, this process exits with the code of the first that failed. When a process dies, all are
    restarted, at most `restarts` times, and resume from their stages and checkpoints. A stop request to this process or
    to any of them stops all without a restart. Each process gets its share of the cores.

    Raises:
        StopRequested: The processes were stopped.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ[stops.LAUNCHED] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # exit statuses are reported below
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
    """Runs the command in several processes and waits for them.

    Raises:
        ChildFailedError: A process failed; the others were ended.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # elastic would also restart processes that were stopped on request
        monitor_interval=0.2,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    elastic_launch(config, sys.executable)("-m", module, *argv)


def stop_processes() -> None:
    """Passes a stop request on to all child processes, including those that are still being started."""
    asked: set[int] = set()
    while True:
        for process in stops.children(os.getpid()):
            if process not in asked:
                asked.add(process)
                with suppress(ProcessLookupError):  # the process has just ended
                    os.kill(process, signal.SIGTERM)  # SIGINT prints a traceback in a process that is starting
        time.sleep(POLL_SECONDS)


def end_as(rank: int, code: int, processes: int, left: int) -> None:
    """Exits with the status of the process `rank`, or returns if the processes are to be restarted.

    Raises:
        StopRequested: The process was stopped on request.
    """
    if code in STOPPED or -code in stops.SIGNALS:
        raise stops.StopRequested(code - 128 if code > 0 else -code)
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    if left:
        print(f"process {rank} of {processes} {how}: started again, {left} restarts left", file=sys.stderr)
        return
    if code < 0:  # a killed process can't report this itself
        fail(f"process {rank} of {processes} {how}; the same command goes on from the last checkpoint")
    sys.exit(128 - code if code < 0 else code)
