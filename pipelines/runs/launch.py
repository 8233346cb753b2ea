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
from pipelines.runs.console import print_error
from pipelines.settings.this_machine import count_cores

STOP_CODES = {128 + number for number in stops.SIGNALS}
THREADS = "OMP_NUM_THREADS"
_POLL_SECONDS = 0.1


def launch_processes(module: str, argv: Sequence[str], processes: int, restarts: int = 0) -> None:
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
    set_thread_share(processes)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # exit statuses are reported below
    stops.defer_stop(lambda number: threading.Thread(target=_stop_children, daemon=True).start())
    for remaining in range(restarts, -1, -1):
        try:
            _run_processes(module, argv, processes)
            break
        except SignalException as stopped:  # SIGHUP and SIGQUIT
            sys.exit(128 + stopped.sigval)
        except ChildFailedError as error:
            stops.raise_if_requested()
            rank, failure = error.get_first_failure()
            _exit_unless_restarting(rank, failure.exitcode, processes, remaining)
    stops.allow_stop()
    stops.raise_if_requested()


def set_thread_share(processes: int) -> None:
    """Gives each process that is started from now on its share of the cores, unless OMP_NUM_THREADS says how many."""
    os.environ.setdefault(THREADS, str(max(1, count_cores() // processes)))


def _run_processes(module: str, argv: Sequence[str], processes: int) -> None:
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


def _stop_children() -> None:
    """Passes a stop request on to all child processes, including those that are still being started."""
    signalled: set[int] = set()
    while True:
        for process in stops.list_children(os.getpid()):
            if process not in signalled:
                signalled.add(process)
                with suppress(ProcessLookupError):  # the process has just ended
                    os.kill(process, signal.SIGTERM)  # SIGINT prints a traceback in a process that is starting
        time.sleep(_POLL_SECONDS)


def _exit_unless_restarting(rank: int, code: int, processes: int, remaining: int) -> None:
    """Exits with the status of the process `rank`, or returns if restarts remain.

    Raises:
        StopRequested: The process was stopped on request.
    """
    if code in STOP_CODES or -code in stops.SIGNALS:
        raise stops.StopRequested(code - 128 if code > 0 else -code)
    cause = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    if remaining:
        count = f"{remaining} restart{'s' * (remaining > 1)}"
        print(f"process {rank} of {processes} {cause}: restarting all processes, {count} left", file=sys.stderr)
        return
    if code < 0:  # a killed process can't report this itself
        print_error(f"process {rank} of {processes} {cause}; run the same command again to resume from the checkpoint")
    sys.exit(128 - code if code < 0 else code)
