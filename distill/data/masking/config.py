"""Settings for the masks of masked language modelling."""

from dataclasses import dataclass

from distill.errors import InputError


@dataclass(frozen=True)
class MaskConfig:
    """Which tokens are masked, and how they are replaced.

    Args:
        rate: Share of the tokens, excluding special ones, that the model predicts.
        replaced: Share of the predicted tokens that are replaced by the mask token.
        random: Share of the predicted tokens that are replaced by a random token; the rest are unchanged.
        seed: Seed of the masks.
        passes: Number of different masks per sample; epoch e uses mask e % passes, so that a cache of the teacher's
            signals is finite.
    """

    rate: float = 0.15
    replaced: float = 0.8
    random: float = 0.1
    seed: int = 0
    passes: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise InputError(
                f"masking.rate: expected a share between 0 and 1, found {self.rate}: "
                "no token would be masked, or none left to predict it from"
            )
        for name in ("replaced", "random"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InputError(f"masking.{name}: expected a share from 0 to 1, found {value}")
        total = self.replaced + self.random
        if total > 1 + 1e-9:  # decimal shares that add up to 1 can exceed it by a rounding error
            raise InputError(
                f"masking.replaced + masking.random: expected at most 1, found {total:g}: "
                "fewer tokens would be random than requested"
            )
        if not 0 <= self.seed < 2**63:
            raise InputError(f"masking.seed: expected 0 to 2**63 - 1, found {self.seed}: it would not fit the hash")
        if self.passes < 1:
            raise InputError(f"masking.passes: expected at least 1, found {self.passes}: no epoch would have a mask")
