"""Settings of pruning: how units are scored and when they are removed."""

from dataclasses import dataclass
from typing import Literal

from compress.errors import CompressError

DEFAULT_UNSEEN = 0.001


@dataclass(frozen=True)
class PruneConfig:
    """Settings of pruning.

    Args:
        scores: Importance score of units: fisher or taylor (of the distillation loss), activation, magnitude.
        schedule: oneshot prunes before the student is trained; iterative prunes in `rounds` with training in between;
            gradual masks units one after another while the student trains, then removes them and continues training.
        masks: How a gradual schedule selects the units to mask: movement (by their gradients), or learned (L0 gates
            driven to the target size by a Lagrangian).
        rounds: Rounds of the iterative schedule.
        gradual_share: Share of the training epochs in which a gradual schedule masks units.
        samples: Training texts on which scores are measured.
        trial_steps: Training steps before the final comparison of candidate shapes; 0 takes the shape with the lowest
            estimated loss.
        vocabulary: Also remove tokens that the training texts don't use; never applied to a language model, whose
            outputs are tokens.
        max_split_share: Share of tokens in unseen text that may be split into smaller tokens because the training texts
            lack them.
        reconstruct: Refit the units that stay to their layers' outputs before pruning, by least squares on the texts of
            the scores (oneshot and iterative schedules).
        embedding_rank: Rank of a factorized token embedding, whose projection maps to the hidden width; 0 keeps the
            full embedding.
        nested: Train the students of all target speeds as one set of weights: each is a part of the slower one.
    """

    scores: Literal["fisher", "taylor", "activation", "magnitude"] = "fisher"
    schedule: Literal["oneshot", "iterative", "gradual"] = "oneshot"
    masks: Literal["movement", "learned"] = "movement"
    rounds: int = 3
    gradual_share: float = 0.3
    samples: int = 512
    trial_steps: int = 150
    vocabulary: bool = True
    max_split_share: float = DEFAULT_UNSEEN
    reconstruct: bool = False
    embedding_rank: int = 0
    nested: bool = False

    def __post_init__(self) -> None:
        for name, smallest in (("rounds", 2), ("samples", 1), ("trial_steps", 0), ("embedding_rank", 0)):
            if getattr(self, name) < smallest:
                raise CompressError(f"prune.{name}: expected at least {smallest}, found {getattr(self, name)}")
        for name, schedule in (("rounds", "iterative"), ("masks", "gradual"), ("gradual_share", "gradual")):
            if getattr(self, name) != getattr(type(self), name) and self.schedule != schedule:
                raise CompressError(
                    f"prune.{name}: expected prune.schedule {schedule} with it, found {self.schedule}, which ignores it"
                )
        if self.reconstruct and self.schedule == "gradual":
            raise CompressError(
                "prune.reconstruct: expected schedule oneshot or iterative, found gradual: units that stay learn to "
                "make up for the others while those are masked"
            )
        if not 0 < self.gradual_share < 1:
            raise CompressError(f"prune.gradual_share: expected a share between 0 and 1, found {self.gradual_share}")
        if not 0 <= self.max_split_share <= 1:
            raise CompressError(f"prune.max_split_share: expected a share from 0 to 1, found {self.max_split_share}")
