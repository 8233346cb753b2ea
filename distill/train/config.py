"""Settings of the optimizer, its schedule and the training loop."""

import re
from dataclasses import dataclass
from typing import Literal

from distill.errors import check_setting

EVERY = re.compile(r"every=([1-9]\d*)")  # a mode of activation checkpointing: every second, third, ... layer

# Version of the training code: losses, module, optimizer, schedule, order of batches. It is part of the key of every
# stage that trains; raise it when the same settings produce different weights, as after a fix in a loss
# (docs/stages.md).
VERSION = 2


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the optimizer, its schedule and the training loop.

    Args:
        epochs: Passes over the training data.
        learning_rate: Peak learning rate of the schedule.
        schedule: `linear` or `cosine` decay to 0 after the warm-up, or `constant`.
        warmup: Share of the steps over which the learning rate rises.
        batch_size: Rows per batch, over all processes.
        accumulate: Batches per optimizer step.
        weight_decay: Weight decay of AdamW, applied to matrices only.
        max_grad_norm: Gradients with a larger norm are clipped to this norm; 0 disables clipping.
        head_rate: Factor on the learning rate of the output head.
        dropout: Replaces the model's own dropout rates during training; if omitted, they are kept. Each process
            draws its own dropout masks, so only at 0 do all layouts and numbers of processes train the same student, up
            to rounding.
        freeze_embeddings: Exclude the token embeddings from training.
        patience: Stop after this number of epochs without a better validation score and keep the best weights; 0
            disables early stopping.
        checkpointing: Layers whose activations are computed again in the backward pass instead of kept: `none`, `full`
            (all layers), `every=K` (every K-th), or `selective` (all, but the results of their costly products are
            kept). It trains the same weights.
        checkpoint_every: Steps between the checkpoints that a killed run resumes from.
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
    checkpointing: str = "none"
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "checkpoint_every"):
            check_setting(self, f"train.{name}", getattr(self, name) >= 1, "at least 1")
        for name in ("learning_rate", "head_rate"):
            check_setting(self, f"train.{name}", getattr(self, name) > 0, "more than 0")
        for name in ("weight_decay", "max_grad_norm", "patience"):
            check_setting(self, f"train.{name}", getattr(self, name) >= 0, "at least 0")
        is_known = self.checkpointing in ("none", "full", "selective") or EVERY.fullmatch(self.checkpointing)
        check_setting(self, "train.checkpointing", bool(is_known), "none, full, selective or every=K")
        check_setting(self, "train.warmup", 0 <= self.warmup < 1, "a share from 0 to below 1")
        check_setting(self, "train.dropout", self.dropout is None or 0 <= self.dropout < 1, "a rate from 0 to below 1")
