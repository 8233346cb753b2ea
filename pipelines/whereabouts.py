"""Where each process of a run is, so that a run which stands still ends with a name and not with silence."""

import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import Callback

from distill.errors import InputError
from pipelines.world import World

NOTE_SECONDS = 1.0
WAITED = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
LOST = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Socket closed", re.IGNORECASE)


class Whereabouts(Callback):
    """Notes the batch that this process is at, for the others to tell when they have waited too long."""

    def __init__(self, world: World):
        self.world, self.noted = world, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if time.monotonic() - self.noted > NOTE_SECONDS:
            self.noted = time.monotonic()
            self.world.note(f"epoch {trainer.current_epoch + 1}, batch {batch_idx + 1}")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.world.note(f"validation after epoch {trainer.current_epoch + 1}")


@contextmanager
def told(world: World) -> Iterator[None]:
    """Turns a collective that waited too long, or lost a process, into an error that names who and what."""
    try:
        yield
    except RuntimeError as error:
        what = "waited too long for" if WAITED.search(str(error)) else "lost" if LOST.search(str(error)) else None
        if world.size == 1 or what is None:
            raise
        places = "; ".join(f"process {rank}: {place}" for rank, place in enumerate(world.places()))
        raise InputError(
            f"process {world.rank} of {world.size} {what} the others in {collective(error)} (last seen: {places}): "
            "checkpoints are kept; the same command goes on from the last one"
        ) from error


def collective(error: BaseException) -> str:
    """The call of torch.distributed that failed, or what reduces gradients without one."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in frames if "/torch/distributed/" in frame.filename and "wrapper" not in frame.name]
    if calls:
        return calls[-1]
    return "the reduction of gradients" if any("backward" in frame.name for frame in frames) else "a collective"
