"""Reports of the position of each process, so that a stalled run ends with an error that names the process."""

import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from distill.errors import InputError
from pipelines.runs import stops
from pipelines.runs.processes import POLL_SECONDS, LostError, World, leave_world

RECORD_EVERY = 1.0  # seconds
LOST, WAITED = "lost", "waited too long for"  # what this process reports about the others
CAUSE_SECONDS = 15.0  # time for a launcher to detect a failed process and to end the others
TIMEOUT_MESSAGE = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
LOSS_MESSAGE = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Socket closed", re.IGNORECASE)


class PositionRecorder(Callback):
    """Callback that records the current batch of this process, for error messages of other processes."""

    def __init__(self, world: World):
        self.world, self.recorded = world, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Records epoch and batch, at most once per second."""
        if time.monotonic() - self.recorded > RECORD_EVERY:
            self.recorded = time.monotonic()
            self.world.record_position(f"epoch {trainer.current_epoch + 1}, batch {batch_idx + 1}")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the epoch that is validated."""
        self.world.record_position(f"validation after epoch {trainer.current_epoch + 1}")


@contextmanager
def explain_failures(world: World) -> Iterator[None]:
    """Turns a collective that timed out or lost a process into an error that names the process and the operation.

    A process that lost another one reports this only if the other's own error is unknown: the error of the process that
    failed first is the relevant one.

    Raises:
        InputError: A collective failed because of another process.
    """
    try:
        yield
    except stops.StopRequested:
        leave_world()
        raise
    except Exception as error:
        relation = classify_failure(error)
        if world.size == 1:
            raise
        if relation is None:
            _report_failure(world, error)
            raise
        stops.raise_if_requested()
        cause = _find_cause(world, CAUSE_SECONDS if relation == LOST else 0)
        positions = "; ".join(f"process {rank}: {position}" for rank, position in enumerate(world.read_positions()))
        raise InputError(
            f"process {world.rank} of {world.size} {relation} the others in {_name_collective(error)} (last reported: "
            f"{positions}): run the same command again to resume from the last checkpoint{cause}"
        ) from error


def classify_failure(error: BaseException) -> str | None:
    """Returns how a collective's error relates to the other processes; None for an error of this process itself."""
    if isinstance(error, LostError):
        return LOST
    if not isinstance(error, RuntimeError):
        return None
    if TIMEOUT_MESSAGE.search(str(error)):
        return WAITED
    return LOST if LOSS_MESSAGE.search(str(error)) else None


def _report_failure(world: World, error: Exception) -> None:
    with suppress(RuntimeError):  # the store disappears with the process that hosts it
        world.report_failure(f"{type(error).__name__}: {error}" if not isinstance(error, InputError) else str(error))


def _find_cause(world: World, seconds: float) -> str:
    """Returns the message of the process that failed, as the end of a sentence; empty if there is none in time.

    A process that was started by a launcher keeps waiting, because the launcher ends it in the meantime.
    """
    end = time.monotonic() + seconds
    with suppress(RuntimeError):
        while True:
            failure = world.read_failure()
            if failure is not None and (not stops.is_launched() or time.monotonic() > end):
                return f"; process {failure[0]} failed: {failure[1]}"
            if time.monotonic() > end:
                break
            time.sleep(POLL_SECONDS)
    return ""


def _name_collective(error: BaseException) -> str:
    """Returns the name of the torch.distributed call that failed, or a description of the gradient reduction."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in frames if "/torch/distributed/" in frame.filename and "wrapper" not in frame.name]
    if calls:
        return calls[-1]
    return "the reduction of gradients" if any("backward" in frame.name for frame in frames) else "a collective"
