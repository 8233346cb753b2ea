"""Return to the last checkpoint after a spike of the loss: at half the learning rate, and without the batch."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from distill.errors import InputError
from distill.train.spikes import LossSpikeError, Spike
from pipelines.runs.console import Console
from pipelines.runs.files import write_json
from pipelines.runs.processes import World

if TYPE_CHECKING:
    from distill.train.module import DistillationModule

FALL = 0.5  # of the learning rate after each spike


def load_spikes(file: Path) -> list[Spike]:
    """Returns the spikes that a `Recovery` wrote to a file; empty without the file."""
    return [Spike(**each) for each in json.loads(file.read_text())] if file.exists() else []


class Recovery:
    """The spikes of a training, kept in a file, so that a killed run resumes with the same rate and batches.

    Args:
        file: Where they are written.
        checkpoints: Folder of the training's checkpoints.
        limit: Number of spikes after which the training fails instead.
        world: The processes of the run, which all see the same spike.
    """

    def __init__(self, file: Path, checkpoints: Path, limit: int, world: World):
        self.file, self.checkpoints, self.limit, self.world = file, checkpoints, limit, world
        self.spikes = load_spikes(file)

    def prepare(self, module: "DistillationModule") -> None:
        """Makes the module skip the batches of the spikes and lower its rate once for each."""
        module.spikes.skipped_batches = frozenset(spike.batch for spike in self.spikes)
        module.spikes.rate_factor = FALL ** len(self.spikes)

    def record(self, error: LossSpikeError, console: Console, label: str) -> None:
        """Adds a spike, after which the training is to be started again.

        Raises:
            InputError: There were as many spikes before it as are allowed.
        """
        spike = error.spike
        if len(self.spikes) >= self.limit:
            expected = f"a loss near {spike.usual:.4g}" if math.isfinite(spike.usual) else "a finite loss"
            raise InputError(
                f"{label}: expected {expected}, found {spike.loss:.4g} in step {spike.step}, after "
                f"{self.limit} recoveries (train.recoveries): lower the learning rate, or look at the data"
            ) from error
        self.spikes.append(spike)
        if self.world.is_rank_zero:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, [asdict(spike) for spike in self.spikes])
        console.say(
            f"  {label}: {error}: back to the last checkpoint, without batch {spike.batch}, at "
            f"{FALL ** len(self.spikes):g} times the learning rate ({len(self.spikes)} of {self.limit} recoveries)"
        )
        self.world.share_files(self.checkpoints)
