"""Starts a command again as several processes, and passes on how they end."""

import os
import signal
import sys
from collections.abc import Sequence
from uuid import uuid4

from pipelines.machine import cores
from pipelines.world import LAUNCHED


def launch(module: str, argv: Sequence[str], processes: int, restarts: int = 0) -> None:
    """Runs `python -m module argv` in `processes` processes on this machine; ends this one with their exit code, or by
    the signal that stopped it.

    When one of them dies, all are started again, at most `restarts` times: stages and checkpoints go on where they
    stood. Each process gets its share of the cores.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *argv)
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:
        # What went wrong was said by the process itself.
        codes = [failure.exitcode for failure in error.failures.values()]
        sys.exit(next((code for code in codes if code > 0), 1))
