"""Detection of a loss that isn't finite or is far above those before it, after which the training has to go back."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

_WINDOW = 32  # most recent losses, whose median is the reference
_FEWEST = 8  # with fewer losses there is no reference: only a loss that isn't finite is a spike


@dataclass(frozen=True)
class Spike:
    """A loss after which the weights can't be trusted.

    Args:
        batch: Number of the batch, counted from the start of the training.
        step: Optimizer steps completed before it.
        loss: The loss.
        usual: The median of the losses before it; NaN if there were too few.
    """

    batch: int
    step: int
    loss: float
    usual: float


class LossSpikeError(Exception):
    """Ends a training at a spike, to be started again from its last checkpoint."""

    def __init__(self, spike: Spike):
        super().__init__(f"loss {spike.loss:.4g} in step {spike.step}, where {spike.usual:.4g} is usual")
        self.spike = spike


class SpikeDetector:
    """The last losses of a training, and whether another is a spike.

    Args:
        ratio: A loss more than this many times the median of the last 32 is a spike.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio
        self.losses: deque[float] = deque(maxlen=_WINDOW)

    @property
    def usual(self) -> float:
        """The median of the last losses; NaN if there are fewer than 8."""
        return median(self.losses) if len(self.losses) >= _FEWEST else math.nan

    def is_spike(self, loss: float) -> bool:
        """Returns whether a loss is a spike; one that isn't is added to the last losses."""
        if not math.isfinite(loss) or loss > self.ratio * self.usual:  # False if the median is NaN
            return True
        self.losses.append(loss)
        return False

    def restore(self, losses: Iterable[float]) -> None:
        """Replaces the last losses by those of a checkpoint."""
        self.losses = deque(losses, maxlen=_WINDOW)
