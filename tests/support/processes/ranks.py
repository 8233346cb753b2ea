"""Runs a function in several processes of a gloo world and collects the results."""

import contextlib
import faulthandler
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.processes.forking import fork_server

LOST_CONNECTION = (
    *("connection closed by peer", "connection reset", "connection refused", "connection timed out"),
    *("timed out connecting", "failed to connect", "trying to connect"),
)


class RanksError(AssertionError):
    """The processes raised errors, died or ran out of time."""


class WorldError(RanksError):
    """The world failed, not the function that it ran."""


class LostConnectionError(WorldError):
    """Processes lost the connection to others that were still running."""


def run_ranks(
    function: Callable[..., Any],
    processes: int,
    *args: Any,
    limit: float = 240.0,
    retried: type[WorldError] = LostConnectionError,
) -> list[Any]:
    """Returns `[function(rank, *args) for rank in range(processes)]`, each call in its own process of a gloo world.

    `function` must be defined at the top level of a module; `function`, `args` and the results must be picklable.
    Tensors are returned on the CPU.

    Args:
        function: What each process runs.
        processes: Their number.
        args: Further arguments of the function.
        limit: Seconds after which processes that aren't done are ended.
        retried: After this error the world is started once more, with a warning that pytest lists in its summary.
            WorldError includes a process that died without a Python error, and one that was ended at the limit.

    Raises:
        RanksError: A process failed; the message contains the traceback of each failed process.
    """
    try:
        return run_world(function, processes, args, limit)
    except retried as error:
        warnings.warn(f"ranks: started once more: {error}", stacklevel=2)
        return run_world(function, processes, args, limit)


def run_world(function: Callable[..., Any], processes: int, args: tuple[Any, ...], limit: float) -> list[Any]:
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=run_rank, args=(rank, processes, folder, limit, function, args), daemon=True)
            for rank in range(processes)
        ]
        for process in started:
            process.start()
        is_finished = wait_for_all(started, time.monotonic() + limit)
        codes = [process.exitcode for process in started]  # without those of processes that are killed here
        for process in started:
            process.kill()
            process.join()
        reports = [Path(folder, f"{rank}.error") for rank in range(processes)]
        errors = [f"rank {rank}: {file.read_text()}" for rank, file in enumerate(reports) if file.exists()]
        failures = [error for error in errors if not lost_connection(error)]
        if failures:
            raise RanksError("\n".join(failures))
        if not is_finished:
            traces = [file.read_text() for file in sorted(Path(folder).glob("*.trace"))]
            raise WorldError("\n".join([f"not done after {limit:.0f} s; {errors}", *traces]))
        if any(codes):
            dead = [rank for rank, code in enumerate(codes) if code and not reports[rank].exists()]
            raise (WorldError if dead else LostConnectionError)(f"exit codes {codes}; {errors}")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(processes)]


def wait_for_all(started: list[Any], end: float) -> bool:
    """Waits until all processes have ended, one has failed, or the time `end` is reached; returns False on timeout."""
    while time.monotonic() < end:
        if any(process.exitcode for process in started):
            time.sleep(0.5)  # time for the other processes' reports
            return True
        if not any(process.is_alive() for process in started):
            return True
        time.sleep(0.02)
    return False


def lost_connection(error: str) -> bool:
    """Returns whether the error reports the loss of another process rather than a local failure."""
    return "Assertion" not in error and any(phrase in error.lower() for phrase in LOST_CONNECTION)


def run_rank(
    rank: int, processes: int, folder: str, limit: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    with Path(folder, f"{rank}.trace").open("w") as trace:
        # Dumps the stack of each process shortly before the time limit.
        faulthandler.dump_traceback_later(0.9 * limit, file=trace)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=processes,
                timeout=timedelta(seconds=limit),
            )
            result = function(rank, *args)
            torch.save(result, Path(folder, f"{rank}.pt"))
            dist.barrier()  # no process exits while another still communicates with it
        except BaseException:  # noqa: BLE001 - reported to the parent
            Path(folder, f"{rank}.error").write_text(traceback.format_exc())
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]
