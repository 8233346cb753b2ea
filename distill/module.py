"""The one LightningModule: a student, the objectives, and a source of teacher signals."""

from collections.abc import Callable
from typing import Any

import lightning
from torch import Tensor, nn
from torchmetrics import Metric
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.losses.compose import gradient_shares, loss_terms, weighted_sum
from distill.losses.config import LossConfig, layer_pairs
from distill.optimizer import build_optimizer, build_schedule, set_dropout
from distill.teacher.online import INPUTS
from distill.training import TrainConfig

Batch = dict[str, Tensor]
Signals = Callable[[Batch], dict[str, Any]]


class DistillationModule(lightning.LightningModule):
    """Trains `student` on the terms of `loss`; without a teacher term it is plain fine-tuning.

    Logs for every term its value, weight and share of the gradient norm (`train/kl`, `train/kl_weight`,
    `train/kl_gradient_share`), the sum, the learning rate and the validation score.

    Args:
        student: A stock transformers model with logits.
        loss: Weights of the terms.
        train: Optimizer and schedule.
        signals: Maps a padded batch to the teacher's signals: a `CacheReader` or an `OnlineTeacher`.
        metric: Updated with (predicted classes [rows], labels [rows]) on the validation split.
        teacher_sizes: (layers, width) of the teacher's hidden states, for the `hidden` term.

    Raises:
        InputError: A term that needs a teacher, and none is given.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        *,
        loss: LossConfig,
        train: TrainConfig,
        signals: Signals | None = None,
        metric: Metric | None = None,
        teacher_sizes: tuple[int, int] | None = None,
    ):
        super().__init__()
        if loss.needs_teacher and signals is None:
            raise InputError("loss: the kl and hidden terms need a teacher, and no signals were given")
        self.student, self.loss, self.train_config, self.signals, self.metric = student, loss, train, signals, metric
        self.pairs: list[tuple[int, int]] = []
        self.projections = nn.ModuleList()
        if loss.hidden:
            self._build_projections(teacher_sizes)
        if train.freeze_embeddings:
            student.get_input_embeddings().weight.requires_grad_(False)

    def _build_projections(self, teacher_sizes: tuple[int, int] | None) -> None:
        if teacher_sizes is None:
            raise InputError("loss.hidden: the sizes of the teacher's hidden states are needed, and none were given")
        layers, width = teacher_sizes
        self.pairs = layer_pairs(self.loss.layer_map, self.student.config.num_hidden_layers, layers)
        own = self.student.config.hidden_size
        for _ in self.pairs:
            self.projections.append(nn.Identity() if own == width else nn.Linear(own, width, bias=False))

    def forward(self, batch: Batch, **kwargs: Any) -> Any:
        return self.student(**{name: batch[name] for name in INPUTS if name in batch}, **kwargs)

    def on_fit_start(self) -> None:
        self.student.train()  # transformers hands models over in eval mode, and Lightning leaves them so
        if self.train_config.dropout is not None:
            set_dropout(self.student, self.train_config.dropout)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """Values of the terms on a batch, unweighted."""
        out = self(batch, output_hidden_states=bool(self.pairs))
        signals = self.signals(batch) if self.signals is not None else {}
        if self.pairs and "hidden" not in signals:
            raise InputError(
                "loss.hidden: the teacher's signals hold no hidden states; use OnlineTeacher(model, hidden=True)"
            )
        logits = signals.get("logits")
        mapped = zip(self.projections, self.pairs, strict=True)
        hidden = [(project(out.hidden_states[s]), signals["hidden"][t]) for project, (s, t) in mapped]
        return loss_terms(
            self.loss,
            out.logits,
            batch["labels"],
            batch["attention_mask"],
            None if logits is None else logits.to(out.logits.device),
            hidden,
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        terms = self.terms(batch)
        total = weighted_sum(self.loss, terms)
        if self._is_logged():
            self._log_terms(total, terms)
        return total

    def _is_logged(self) -> bool:
        trainer: Any = self._trainer
        # Lightning hands to its loggers what is logged in the step before each multiple, and drops the rest.
        return trainer is not None and (trainer.global_step + 1) % trainer.log_every_n_steps == 0

    def _log_terms(self, total: Tensor, terms: dict[str, Tensor]) -> None:
        if not total.isfinite():
            raise InputError(
                f"train: the loss is {total.item()} in step {self.trainer.global_step}: nothing is learnt from here; "
                "lower the learning rate or look for extreme values in the teacher's signals"
            )
        values: dict[str, Any] = {"train/loss": total.detach(), "lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        shares = gradient_shares(self.loss, terms, self.parameters())
        for name, value in terms.items():
            values[f"train/{name}"] = value.detach()
            values[f"train/{name}_weight"] = getattr(self.loss, name)
            values[f"train/{name}_gradient_share"] = shares[name]
        self.log_dict(values)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self(batch).logits
        rows = len(batch["labels"])
        loss = nn.functional.cross_entropy(logits.float(), batch["labels"])
        self.log("val/loss", loss, on_epoch=True, batch_size=rows, sync_dist=True)
        if self.metric is not None:
            self.metric.update(logits.argmax(-1), batch["labels"])
            self.log("val/score", self.metric, on_epoch=True, batch_size=rows)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.student, self.projections.parameters(), self.train_config)
        schedule = build_schedule(optimizer, self.train_config, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
