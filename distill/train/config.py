"""Settings of the optimizer, its schedule and the training loop."""

import re
from dataclasses import dataclass, replace
from typing import Literal, Self

from distill.errors import InputError, check_setting
from distill.train.optimizer_kinds import ADAMW_RATE, OPTIMIZERS, check_optimizer_name

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
        optimizer: One of `adamw`, `adam`, `sgd` (with Nesterov's momentum), `adagrad`, `adadelta`, `rmsprop`, `adamax`,
            `nadam`, `radam`, `adafactor`, `muon` (AdamW for all but the matrices of layers), `apollo` (moments of a
            projection of rank 32), `lamb`, `lion`, `soap`, `schedule-free`, `adamw-8bit`, `adamw-4bit`, `adamw-fp8`.
        learning_rate: Peak learning rate of the schedule; if omitted, the optimizer's usual one.
        schedule: `linear` or `cosine` decay to 0 after the warm-up, or `constant`; `auto` is `linear`, or `constant`
            with the optimizer `schedule-free`.
        warmup: Share of the steps over which the learning rate rises.
        batch_size: Rows per batch, over all processes.
        accumulate: Batches per optimizer step.
        weight_decay: Weight decay, applied to matrices only.
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
    optimizer: str = "adamw"
    learning_rate: float | None = None
    schedule: Literal["auto", "linear", "cosine", "constant"] = "auto"
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
        check_optimizer_name(self.optimizer, "train.optimizer")
        check_setting(self, "train.learning_rate", self.learning_rate is None or self.learning_rate > 0, "more than 0")
        check_setting(self, "train.head_rate", self.head_rate > 0, "more than 0")
        for name in ("weight_decay", "max_grad_norm", "patience"):
            check_setting(self, f"train.{name}", getattr(self, name) >= 0, "at least 0")
        is_known = self.checkpointing in ("none", "full", "selective") or EVERY.fullmatch(self.checkpointing)
        check_setting(self, "train.checkpointing", bool(is_known), "none, full, selective or every=K")
        check_setting(self, "train.warmup", 0 <= self.warmup < 1, "a share from 0 to below 1")
        check_setting(self, "train.dropout", self.dropout is None or 0 <= self.dropout < 1, "a rate from 0 to below 1")
        if self.optimizer == "schedule-free" and self.schedule not in ("auto", "constant"):
            raise InputError(
                f"train.schedule: expected constant with the optimizer schedule-free, found {self.schedule}: it "
                "averages the weights instead of lowering the rate"
            )

    def resolve(self, adamw_rate: float = ADAMW_RATE) -> Self:
        """Returns the settings with the learning rate and the schedule that the optimizer has where they are omitted.

        Args:
            adamw_rate: The learning rate of AdamW in this place; others have a usual multiple of it.
        """
        schedule = self.schedule
        if schedule == "auto":
            schedule = "constant" if self.optimizer == "schedule-free" else "linear"
        rate = adamw_rate * OPTIMIZERS[self.optimizer].rate if self.learning_rate is None else self.learning_rate
        return replace(self, learning_rate=rate, schedule=schedule)

    @property
    def peak_rate(self) -> float:
        """The learning rate, or the optimizer's usual one if it is omitted."""
        rate = self.resolve().learning_rate
        assert rate is not None
        return rate
