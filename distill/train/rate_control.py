"""A factor on the learning rate that falls when the validation stops improving."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from distill.train.config import TrainConfig


@dataclass
class RateControl:
    """The factor and what it depends on; `asdict` of it is a training checkpoint's entry.

    Args:
        factor: Of all learning rates.
        best: The best value of the validation so far; None before the first.
        waited: Validations since then.
        cooling: Validations that are still ignored after a fall.
        falls: Optimizer steps before each fall, and the factor after it.
    """

    factor: float = 1.0
    best: float | None = None
    waited: int = 0
    cooling: int = 0
    falls: list[tuple[int, float]] = field(default_factory=list)

    def observe_validation(self, value: float, config: TrainConfig) -> bool:
        """Counts a validation, whose value is the better the higher it is; returns whether the factor fell.

        Args:
            value: The score, or the negative loss.
            config: Its `plateau_patience`, `plateau_factor` and `plateau_cooldown`; the factor never falls below
                `min_rate`.

        Source: ReduceLROnPlateau of torch.optim, with an absolute threshold of 0.
        """
        if not math.isnan(value) and (self.best is None or value > self.best):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.cooling:
            self.cooling, self.waited = self.cooling - 1, 0
        if self.waited <= config.plateau_patience or self.factor <= config.min_rate:
            return False
        self.factor = max(self.factor * config.plateau_factor, config.min_rate)
        self.waited, self.cooling = 0, config.plateau_cooldown
        return True

    def state_dict(self) -> dict[str, object]:
        """Returns the state that a resumed training continues from."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores the state of `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)
