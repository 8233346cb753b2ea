"""Reports of the position of each process, so that a stalled run ends with an error that names the process."""

import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning.pytorch.callbacks import Callback

from distill.errors import InputError
from pipelines.runs import stops
from pipelines.runs.processes import POLL_SECONDS, LostError, World, leave_world

NOTE_SECONDS = 1.0
LOSS = "lost"
CAUSE_SECONDS = 15.0  # time for a launcher to detect a failed process and to end the others
WAITED = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
LOST = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Socket closed", re.IGNORECASE)


class PositionRecorder(Callback):
    """Callback that records the current batch of this process, for error messages of other processes."""

    def __init__(self, world: World):
        self.world, self.noted = world, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if time.monotonic() - self.noted > NOTE_SECONDS:
            self.noted = time.monotonic()
            self.world.note(f"epoch {trainer.current_epoch + 1}, batch {batch_idx + 1}")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.world.note(f"validation after epoch {trainer.current_epoch + 1}")


@contextmanager
def explain_failures(world: World) -> Iterator[None]:
    """Turns a collective that timed out or lost a process into an error that names the process and the operation.

    A process that lost another one reports this only if the other's own error is unknown: the error of the process that
    failed first is the relevant one.
    """
    try:
        yield
    except stops.StopRequested:
        leave_world()
        raise
    except Exception as error:
        what = lost_by(error)
        if world.size == 1:
            raise
        if what is None:
            report(world, error)
            raise
        stops.check()
        cause = cause_of(world, CAUSE_SECONDS if what == LOSS else 0)
        places = "; ".join(f"process {rank}: {place}" for rank, place in enumerate(world.places()))
        raise InputError(
            f"process {world.rank} of {world.size} {what} the others in {collective(error)} (last seen: {places}): "
            f"checkpoints are kept; the same command goes on from the last one{cause}"
        ) from error


def lost_by(error: BaseException) -> str | None:
    """Returns how a collective's error describes the other processes; None for an error of this process itself."""
    if isinstance(error, LostError):
        return LOSS
    if not isinstance(error, RuntimeError):
        return None
    return "waited too long for" if WAITED.search(str(error)) else LOSS if LOST.search(str(error)) else None


def report(world: World, error: Exception) -> None:
    with suppress(RuntimeError):  # the store disappears with the process that hosts it
        world.report_failure(f"{type(error).__name__}: {error}" if not isinstance(error, InputError) else str(error))


def cause_of(world: World, seconds: float) -> str:
    """Returns the message of the process that failed, as the end of a sentence; empty if there is none in time.

    A process that was started by a launcher keeps waiting, because the launcher ends it in the meantime.
    """
    end = time.monotonic() + seconds
    with suppress(RuntimeError):
        while True:
            found = world.failure()
            if found is not None and (not stops.is_launched() or time.monotonic() > end):
                return f"; process {found[0]} failed: {found[1]}"
            if time.monotonic() > end:
                break
            time.sleep(POLL_SECONDS)
    return ""


def collective(error: BaseException) -> str:
    """Returns the name of the torch.distributed call that failed, or a description of the gradient reduction."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in frames if "/torch/distributed/" in frame.filename and "wrapper" not in frame.name]
    if calls:
        return calls[-1]
    return "the reduction of gradients" if any("backward" in frame.name for frame in frames) else "a collective"
