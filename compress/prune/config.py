"""How a model is pruned: what its units are judged by, and when they go."""

from dataclasses import dataclass
from typing import Literal

from compress.errors import CompressError


@dataclass(frozen=True)
class PruneConfig:
    """Settings of pruning.

    Args:
        scores: What units are worth: fisher or taylor (of the distillation loss), activation, magnitude.
        schedule: oneshot prunes before the student is trained; iterative in `rounds` with training between them;
            gradual closes units one after another while the student trains, then takes them out and trains on.
        masks: Which units a gradual schedule closes: by movement (their gradients), or learned (L0 gates pushed to the
            size by a Lagrangian).
        rounds: Rounds of the iterative schedule.
        gradual: Share of the training's epochs in which a gradual schedule closes units.
        samples: Training texts that scores are measured on.
        trials: Steps before the last comparison of candidate shapes; 0 takes the one of least estimated loss.
        vocabulary: Also remove words that the training texts don't use; never of a language model: it answers with
            them.
        unseen: Share of further text's words that may be spelt in pieces since the training texts lack them.
        embedding_rank: Columns of the word table, which a projection then takes to the hidden width; 0 leaves it whole.
    """

    scores: Literal["fisher", "taylor", "activation", "magnitude"] = "fisher"
    schedule: Literal["oneshot", "iterative", "gradual"] = "oneshot"
    masks: Literal["movement", "learned"] = "movement"
    rounds: int = 3
    gradual: float = 0.3
    samples: int = 512
    trials: int = 150
    vocabulary: bool = True
    unseen: float = 0.001
    embedding_rank: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rounds", 2), ("samples", 1), ("trials", 0), ("embedding_rank", 0)):
            if getattr(self, name) < least:
                raise CompressError(f"prune.{name}: expected at least {least}, found {getattr(self, name)}")
        if not 0 < self.gradual < 1:
            raise CompressError(f"prune.gradual: expected a share between 0 and 1, found {self.gradual}")
        if not 0 <= self.unseen <= 1:
            raise CompressError(f"prune.unseen: expected a share from 0 to 1, found {self.unseen}")
