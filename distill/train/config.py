"""Settings of the optimizer, its schedule and the training loop."""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, Self

from distill.errors import InputError, check_setting
from distill.train.optimizer_kinds import ADAMW_RATE, OPTIMIZERS, check_optimizer_name

Offload = Literal["none", "activations"]
AUTO = "auto"  # chosen from a measurement when the training starts
EVERY = re.compile(r"every=([1-9]\d*)")  # a mode of activation checkpointing: every second, third, ... layer

# Version of the training code: losses, module, optimizer, schedule, order of batches. It is part of the key of every
# stage that trains; raise it when the same settings produce different weights, as after a fix in a loss
# (docs/stages.md).
VERSION = 5


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the optimizer, its schedule and the training loop.

    Args:
        epochs: Passes over the training data.
        optimizer: One of `adamw`, `adam`, `sgd` (with Nesterov's momentum), `adagrad`, `adadelta`, `rmsprop`, `adamax`,
            `nadam`, `radam`, `adafactor`, `muon` (AdamW for all but the matrices of layers), `apollo` (moments of a
            projection of rank 32), `lamb`, `lion`, `soap`, `schedule-free`, `adamw-8bit`, `adamw-4bit`, `adamw-fp8`.
        learning_rate: Peak learning rate of the schedule; if omitted, the optimizer's usual one; AdamW's is 1e-4 for a
            student, 5e-5 for a teacher, 5e-4 on plain text and 5e-3 without attention.
        schedule: The learning rate after the warm-up: `linear`, `cosine` or `polynomial` decay; cosine decay with
            `restarts`; `stable`, constant with a decay at the end; `plateau`, reduced whenever validation stops
            improving; `constant`; or `find`, linear decay from a peak found by a range test before training. `auto` is
            `linear`, or `constant` with the optimizer `schedule-free`.
        power: Exponent of the `polynomial` decay.
        cycles: Number of decays with `restarts`.
        decay_share: Final share of the steps after the warm-up in which `stable` decays.
        plateau_patience: Validations without improvement that `plateau` waits for.
        plateau_factor: Factor by which `plateau` lowers the rate.
        plateau_cooldown: Validations that `plateau` ignores after lowering the rate.
        min_rate: The lowest learning rate after the warm-up, as a share of the peak.
        warmup: Share of the steps over which the learning rate rises.
        batch_size: Rows per batch, over all processes; `auto` is `reference_batch`, split into the largest
            micro-batches that fit into memory, with the same losses up to rounding (one process).
        batch_tokens: Maximum tokens per batch, including padding, over all processes, instead of rows; 0 counts rows.
            Every sample has the same weight, so a batch counts in proportion to its rows.
        accumulate: Batches per optimizer step.
        batch_growth: Whether the effective batch is doubled between epochs by accumulating more batches: `none`,
            `schedule` (after every epoch), or `noise`, if the measured gradient noise scale is at least twice the
            batch. The learning rate grows with its square root, or linearly with `rate_scaling: linear`.
        largest_batch: Maximum rows of the effective batch with `batch_growth`.
        rate_scaling: How the learning rate scales with the effective batch, `batch_size` times `accumulate`: `none`, or
            by its ratio to `reference_batch` (`linear`, as for SGD) or the square root of that (`sqrt`, as for Adam).
        reference_batch: Rows of the effective batch that the learning rate was chosen for.
        weight_decay: Weight decay, applied to matrices only; if omitted, 0.01, or 0 for `adam`, `adagrad`, `adadelta`,
            `rmsprop` and `adamax`, which add it to the gradient (not decoupled).
        max_grad_norm: Gradients with a larger norm are clipped to this norm; 0 disables clipping.
        head_rate: Factor on the learning rate of the output head, and of projections between layers.
        dropout: Replaces the model's own dropout rates during training; if omitted, they are kept. Each process
            draws its own dropout masks, so only at 0 do all layouts and numbers of processes train the same student, up
            to rounding.
        freeze_embeddings: Exclude the token embeddings from training.
        ema_decay: Decay per step of an exponential moving average (EMA) of the weights, such as 0.999, which validation
            and the trained model use; 0 disables it.
        patience: Stop after this number of epochs without a better validation score and keep the best weights; 0
            disables early stopping.
        recoveries: How often training may go back to its last checkpoint after a loss spike and continue at half the
            learning rate without that step's batches; 0 disables spike detection.
        spike: A loss is a spike if it isn't finite or is more than this many times the median of the last 32.
        checkpointing: Layers whose activations are recomputed in the backward pass instead of kept: `none`, `full` (all
            layers), `every=K` (every K-th), `selective` (all, but the results of costly products are kept), or `auto`,
            the fastest that fits into `machine.memory` or free memory. The trained weights are the same.
        backward_window: Window of truncated backpropagation in tokens; 0 trains on whole documents. Later windows
            attend to the keys and values of earlier ones, but pass no gradient to them, so activation memory depends on
            the window. For decoders in one process.
        offload: With `activations`, those kept for the backward pass are moved off the device until then: from a GPU to
            CPU memory, from a CPU to an unnamed file in the run's folder. The trained weights are the same.
        checkpoint_every: Steps between the checkpoints that a killed run resumes from.
    """

    epochs: int = 6
    optimizer: str = "adamw"
    learning_rate: float | None = None
    schedule: Literal[
        "auto", "linear", "cosine", "constant", "polynomial", "restarts", "stable", "plateau", "find",
    ] = "auto"  # fmt: skip
    power: float = 2.0
    cycles: int = 3
    decay_share: float = 0.2
    plateau_patience: int = 1
    plateau_factor: float = 0.5
    plateau_cooldown: int = 0
    min_rate: float = 0.0
    warmup: float = 0.1
    batch_size: int | Literal["auto"] = 32
    batch_tokens: int = 0
    accumulate: int = 1
    batch_growth: Literal["none", "schedule", "noise"] = "none"
    largest_batch: int = 256
    rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    reference_batch: int = 32
    weight_decay: float | None = None
    max_grad_norm: float = 1.0
    head_rate: float = 1.0
    dropout: float | None = None
    freeze_embeddings: bool = False
    ema_decay: float = 0.0
    patience: int = 0
    recoveries: int = 0
    spike: float = 8.0
    checkpointing: str = "none"
    backward_window: int = 0
    offload: Offload = "none"
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "cycles", "reference_batch", "checkpoint_every"):
            check_setting(self, f"train.{name}", getattr(self, name) >= 1, "at least 1")
        check_setting(self, "train.batch_size", self.rows >= 1, "at least 1, or auto")
        check_optimizer_name(self.optimizer, "train.optimizer")
        check_setting(self, "train.learning_rate", self.learning_rate is None or self.learning_rate > 0, "more than 0")
        check_setting(self, "train.weight_decay", self.weight_decay is None or self.weight_decay >= 0, "at least 0")
        check_setting(self, "train.spike", self.spike > 1, "more than 1")
        check_setting(self, "train.power", self.power > 0, "more than 0")
        check_setting(self, "train.decay_share", 0 < self.decay_share <= 1, "a share above 0, at most 1")
        check_setting(self, "train.plateau_factor", 0 < self.plateau_factor < 1, "a factor between 0 and 1")
        check_setting(self, "train.min_rate", 0 <= self.min_rate < 1, "a share from 0 to below 1")
        check_setting(self, "train.head_rate", self.head_rate > 0, "more than 0")
        for name in (
            "max_grad_norm",
            "patience",
            "plateau_patience",
            "plateau_cooldown",
            "recoveries",
            "batch_tokens",
            "backward_window",
        ):
            check_setting(self, f"train.{name}", getattr(self, name) >= 0, "at least 0")
        is_known = self.checkpointing in ("none", "full", "selective", AUTO) or EVERY.fullmatch(self.checkpointing)
        check_setting(self, "train.checkpointing", bool(is_known), "none, full, selective, every=K or auto")
        check_setting(self, "train.ema_decay", 0 <= self.ema_decay < 1, "a decay from 0 to below 1")
        check_setting(self, "train.warmup", 0 <= self.warmup < 1, "a share from 0 to below 1")
        check_setting(self, "train.dropout", self.dropout is None or 0 <= self.dropout < 1, "a rate from 0 to below 1")
        if self.batch_tokens and self.rate_scaling != "none":
            raise InputError(
                f"train.rate_scaling: expected none with batch_tokens, found {self.rate_scaling}: the batches have no "
                "fixed number of rows"
            )
        if self.batch_growth != "none":
            self._check_growth()
        if self.optimizer == "schedule-free" and self.ema_decay:
            raise InputError(
                f"train.ema_decay: expected 0 with the optimizer schedule-free, found {self.ema_decay}: it averages "
                "the weights itself"
            )
        if self.optimizer == "schedule-free" and self.schedule not in ("auto", "constant"):
            raise InputError(
                f"train.schedule: expected constant with the optimizer schedule-free, found {self.schedule}: it "
                "averages the weights instead of lowering the rate"
            )

    def _check_growth(self) -> None:
        """Checks that the batch can grow.

        Raises:
            InputError: It has no fixed number of rows or is too large already, or its noise can't be measured.
        """
        if self.batch_growth == "noise" and self.accumulate < 2:
            raise InputError(
                f"train.batch_growth noise: expected accumulate of 2 or more, found {self.accumulate}: the noise is "
                "estimated from the gradients of a batch and of the accumulated ones"
            )
        if self.batch_tokens:
            raise InputError(
                f"train.batch_growth {self.batch_growth}: expected no batch_tokens, found {self.batch_tokens}: the "
                "batches have no fixed number of rows"
            )
        doubled = 2 * self.rows * self.accumulate
        if self.largest_batch < doubled:
            raise InputError(
                f"train.largest_batch: expected at least {doubled} rows, twice those of a step, found "
                f"{self.largest_batch}: the batch would never grow"
            )

    def resolve(self, adamw_rate: float = ADAMW_RATE) -> Self:
        """Returns the settings with the learning rate and the schedule that the optimizer has where they are omitted.

        Args:
            adamw_rate: The learning rate of AdamW in this place; others have a usual multiple of it.
        """
        schedule = self.schedule
        if schedule == "auto":
            schedule = "constant" if self.optimizer == "schedule-free" else "linear"
        rate = self.choose_rate(adamw_rate)
        return replace(self, learning_rate=rate, schedule=schedule, weight_decay=self.choose_decay())

    def choose_rate(self, adamw_rate: float = ADAMW_RATE) -> float:
        """Returns the learning rate, or the optimizer's usual multiple of AdamW's if it is omitted."""
        return adamw_rate * OPTIMIZERS[self.optimizer].rate if self.learning_rate is None else self.learning_rate

    def choose_decay(self) -> float:
        """Returns the weight decay, or the optimizer's usual one if it is omitted."""
        return OPTIMIZERS[self.optimizer].decay if self.weight_decay is None else self.weight_decay

    @property
    def rows(self) -> int:
        """Rows per batch, over all processes."""
        return self.reference_batch if self.batch_size == AUTO else int(self.batch_size)

    @property
    def peak_rate(self) -> float:
        """The learning rate, or the optimizer's usual one if it is omitted, scaled to the effective batch."""
        exponent = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.rate_scaling]
        ratio = self.rows * self.accumulate / self.reference_batch
        return self.choose_rate() * math.pow(ratio, exponent)
