"""How a model is trained."""

from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError

# Of training itself: losses, module, optimizer, schedule, order of batches. It is in the key of every stage that
# trains; raise it when the same settings give other weights, as after a fix in a loss (docs/stages.md).
VERSION = 1


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the optimizer, its schedule and the loop.

    Args:
        epochs: Passes over the training data.
        learning_rate: Peak of the schedule.
        schedule: `linear` or `cosine` to 0 after the warm-up, or `constant`.
        warmup: Share of the steps over which the rate rises.
        batch_size: Rows a batch, of all processes together.
        accumulate: Batches a step of the optimizer.
        weight_decay: AdamW's, on matrices only.
        max_grad_norm: Longer gradients are cut to this norm; 0 never cuts.
        head_rate: Factor on the learning rate of the output head.
        dropout: Replaces the model's own rates while it trains; left out keeps them. Each process draws its own units
            to drop, so only at 0 do layouts and numbers of processes train the same student, up to rounding.
        freeze_embeddings: Leave the token embeddings as they are.
        patience: Stop after so many epochs without a better validation score and keep the best weights; 0 never stops.
        checkpoint_every: Steps between the checkpoints that a killed run goes on from.
    """

    epochs: int = 6
    learning_rate: float = 1e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: float = 0.1
    batch_size: int = 32
    accumulate: int = 1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    head_rate: float = 1.0
    dropout: float | None = None
    freeze_embeddings: bool = False
    patience: int = 0
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "checkpoint_every"):
            self._expect(name, getattr(self, name) >= 1, "at least 1")
        for name in ("learning_rate", "head_rate"):
            self._expect(name, getattr(self, name) > 0, "more than 0")
        for name in ("weight_decay", "max_grad_norm", "patience"):
            self._expect(name, getattr(self, name) >= 0, "at least 0")
        self._expect("warmup", 0 <= self.warmup < 1, "a share from 0 to below 1")
        self._expect("dropout", self.dropout is None or 0 <= self.dropout < 1, "a rate from 0 to below 1")

    def _expect(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise InputError(f"train.{name}: expected {wanted}, found {getattr(self, name)}")
