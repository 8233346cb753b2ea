"""The LightningModule that trains a student on a weighted sum of objectives with signals from a teacher."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric, Metric
from transformers import PreTrainedModel

from distill.checkpoint.outputs import find_logits
from distill.data.batches.encode import IGNORED
from distill.data.batches.share import loss_counts
from distill.errors import InputError
from distill.losses.compose import gradient_shares, loss_terms, scale_by_share, weighted_sum
from distill.losses.config import LayerSizes, LossConfig
from distill.losses.logits import label_loss
from distill.models.attention import Vectors, watching
from distill.models.inputs import inputs_of, model_inputs
from distill.models.layer_sizes import sizes_of
from distill.models.output_head import restrict_logits, vocabulary_classes
from distill.parallel.clip import clip_gradients
from distill.parallel.pipeline import PipelineForward, PipelineTrainer
from distill.parallel.pipeline_stage import freeze_embeddings
from distill.tasks.logit_rows import OutputRows, by_row, facts_of, rows_of
from distill.train.balance import Balance
from distill.train.config import TrainConfig
from distill.train.layer_terms import LayerTerms
from distill.train.optimizer import build_optimizer, build_schedule, set_dropout
from distill.train.steps.across_tokenizers import CrossTokenizerKL
from distill.train.steps.fused import FusedKL
from distill.train.steps.on_policy import OnPolicy, check_on_policy
from distill.train.steps.progressive import ending_after
from distill.train.steps.signals import check_signals

Batch = dict[str, Tensor]
Signals = Callable[[Batch], Mapping[str, Any]]
LAYER_TERMS = ("hidden", "attention", "relations")  # terms that compare layers


class DistillationModule(lightning.LightningModule):
    """Lightning module that trains `student` on the terms of `loss`; without a teacher term it is plain fine-tuning.

    Logs the value, weight and share of the gradient norm of every term (`train/kl`, `train/kl_weight`,
    `train/kl_gradient_share`), the total loss, the learning rate and the validation score; with `loss.layer_map:
    dynamic` also the teacher layer that each student layer is matched to (`train/matched_3`).

    Args:
        student: A stock transformers model with logits.
        loss: Weights of the terms.
        train: Optimizer and schedule.
        signals: Maps a padded batch to the teacher's signals: an `OnlineTeacher`, or a `CacheReader` read in the step.
            None where the batches contain the signals (`TextDataModule(signals=reader)` prefetches them).
        metric: Updated with (logits [rows, classes], labels [rows]) on the validation split.
        answers: Defines a row. By default a row is a sample, or a position if the student outputs logits for every
            token.
        teacher_sizes: Sizes of the teacher as returned by `sizes_of`, for the terms on layers and vectors; the numbers
            of heads are used by `attention`.
        shard_optimizer: Each replica of the student stores only a part of the optimizer state (ZeRO-1).
        stages: Runs all pipeline stages where the student is one of them.
        across: Computes `kl` in place of `signals` where the teacher has a different tokenizer.
        on_policy: In a share of the steps the student trains on sequences that it generates itself, for which `signals`
            is queried; logs the share of the time spent on generation (`train/generation_share`).

    Raises:
        InputError: A term needs the sizes of the teacher and none are given; on-policy training with a student that
            can't generate text or a teacher that can't be queried in the step; in the first step, neither `signals` nor
            the batch provides the signals of a term.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        *,
        loss: LossConfig,
        train: TrainConfig,
        signals: Signals | None = None,
        metric: Metric | None = None,
        answers: OutputRows | None = None,
        teacher_sizes: tuple[Any, ...] | None = None,
        shard_optimizer: bool = False,
        stages: PipelineTrainer | None = None,
        on_policy: OnPolicy | None = None,
        across: CrossTokenizerKL | None = None,
    ):
        super().__init__()
        if on_policy is not None:
            on_policy.teacher = on_policy.teacher or getattr(getattr(signals, "model", None), "config", None)
            check_on_policy(on_policy, student, loss, signals, staged=stages is not None)
        loss = replace(loss, temperature=loss.softness)
        self.student, self.loss, self.train_config, self.signals, self.metric = student, loss, train, signals, metric
        self.answers = answers or OutputRows()
        self.val_loss, self.shard_optimizer, self.stages = MeanMetric(), shard_optimizer, stages
        self.on_policy, self.across, self.headless = on_policy, across, FusedKL(student, loss, self.answers)
        self.make_optimizer: Callable[..., Optimizer] | None = None  # replaces AdamW, called with the same arguments
        self.taught = self._taught(teacher_sizes)
        self.steps, self.balance = 1, Balance(loss.balance)  # `steps`: optimizer steps of the whole training
        if train.freeze_embeddings:
            freeze_embeddings(student)

    def _taught(self, teacher_sizes: tuple[Any, ...] | None) -> LayerTerms:
        asked = [name for name in LAYER_TERMS if getattr(self.loss, name)]
        if (asked or self.loss.of_vectors) and self.stages is not None:
            name = asked[0] if asked else "embedding"
            raise InputError(f"loss.{name}: a student in pipeline stages has no process with all its layers; use kl")
        if asked and teacher_sizes is None:
            raise InputError(f"loss.{asked[0]}: the sizes of the teacher are needed, and none were given")
        own = sizes_of(self.student.config)
        return LayerTerms(self.loss, own, LayerSizes(*teacher_sizes) if teacher_sizes else own)

    def forward(self, batch: Batch, **kwargs: Any) -> Any:
        """Returns the student's output; vocabulary logits only at the requested positions, [rows, vocabulary]."""
        with restrict_logits(self.student, batch):
            return self.student(**model_inputs(self.student, batch), **kwargs)

    def on_fit_start(self) -> None:
        self.student.train()  # transformers loads models in eval mode, and Lightning does not change the mode
        if self.train_config.dropout is not None:
            set_dropout(self.student, self.train_config.dropout)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the unweighted values of the terms on a batch; those of a process's share of a batch are scaled by
        `shares`.
        """
        if self.across is not None:
            return self._terms_across(batch, self.across)
        signals = self.signals_of(batch)
        with self.headless.reading(batch, signals if self._may_fuse else {}) as read:
            logits, hidden, vectors = self._answers(batch)
        device = batch["attention_mask"].device
        given = {name: value.to(device) for name, value in signals.items() if isinstance(value, Tensor)}
        mean = partial(self._mean_distance, batch)
        pairs = self.taught.pairs(batch["attention_mask"], hidden, vectors, signals, mean)
        if logits is not None and self.loss.of_vectors:
            pairs |= self.taught.vector_pairs(logits, given)
        logits = logits if self.loss.of_labels else None
        said = {} if logits is None else self.answers.signals(batch, given | self._facts(signals))
        own = None if logits is None or read is not None else self.answers.logits(batch, logits)
        labels = None if own is None else self.answers.labels(batch)
        texts = batch.get("documents", batch["attention_mask"])
        terms = loss_terms(self.now, own, labels, texts, said, pairs)
        if read is not None:
            terms = {"kl": self.headless.kl(read[0], said, self.now.softness)} | terms
        return scale_by_share(self.loss, terms, batch["shares"]) if "shares" in batch else terms  # type: ignore[arg-type]

    def _terms_across(self, batch: Batch, across: CrossTokenizerKL) -> dict[str, Tensor]:
        logits = self.student(**inputs_of(batch)).logits
        terms = {"kl": across(logits, batch)} if self.loss.kl else {}
        if self.loss.ce:
            terms["ce"] = label_loss(rows_of(batch, logits, 2), rows_of(batch, batch["labels"], 1))
        return terms

    @property
    def _may_fuse(self) -> bool:
        trainer: Any = self._trainer
        return not self.taught.turn and (trainer is None or trainer.world_size == 1)

    def _mean_distance(self, batch: Batch, distances: Tensor) -> Tensor:
        if self._trainer is None or self._trainer.world_size == 1:
            return distances
        share: Any = batch.get("shares", {"tokens": 1.0})
        return self._trainer.strategy.reduce(distances * share["tokens"], reduce_op="mean")

    def _answers(self, batch: Batch) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Vectors]]:
        """Returns the student's logits, hidden states and attention vectors that the terms need."""
        lessons, turn = self.taught.lessons, self.taught.turn
        watched: AbstractContextManager[list[Vectors]] = (
            watching(self.student) if lessons.vector_layers else nullcontext([])
        )
        with watched as vectors:
            if turn:
                with ending_after(self.student, turn) as states:
                    self(batch)
                return None, states, vectors
            out = self(batch, output_hidden_states=bool(lessons.hidden))
        return find_logits(out), out.hidden_states if lessons.hidden else (), vectors

    def signals_of(self, batch: Batch) -> Mapping[str, Any]:
        """Returns the teacher's signals for a batch, from the batch itself or by querying `signals`, after
        `check_signals`.
        """
        if not self.loss.needs_teacher:
            return {}
        if "signals" not in batch and self.signals is None:
            raise InputError("loss: terms that read the teacher need signals, and none were given")
        signals: Mapping[str, Any] = batch["signals"] if "signals" in batch else self.signals(batch)  # type: ignore
        check_signals(signals, batch, self.taught.check(signals), outputs=self.loss.kl > 0 or self.loss.of_vectors)
        return signals

    def _facts(self, signals: Mapping[str, Any]) -> dict[str, Any]:
        return facts_of(signals) | vocabulary_classes(self.student, signals)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.stages is not None:
            if batch_idx % self.trainer.accumulate_grad_batches == 0:
                self.zero_grad()
            return self._staged_step(self.stages, batch)
        terms = self.terms(self._batch_of_step(batch))
        self._balance(terms)
        total = weighted_sum(self.now, terms)
        if self._is_logged():
            self._log_terms(total, terms)
        return total

    def _batch_of_step(self, batch: Batch) -> Batch:
        trainer: Any = self._trainer
        if self.on_policy is None:
            return batch
        if trainer is None:
            return self.on_policy.batch_for(self.student, 0, batch)
        mean = partial(trainer.strategy.reduce, reduce_op="mean")
        return self.on_policy.batch_for(self.student, trainer.global_step, batch, mean)

    @property
    def now(self) -> LossConfig:
        """The loss settings of the current step: ramps and gradient balancing applied."""
        trainer: Any = self._trainer
        progress = 0.0 if trainer is None or not self.loss.ramps else trainer.global_step / max(1, self.steps - 1)
        return self.balance.scaled(self.loss.at(min(1.0, progress)))

    def _balance(self, terms: dict[str, Tensor]) -> None:
        trainer: Any = self._trainer
        if trainer is None or not self.balance.every:
            return

        def mean(norm: float) -> float:
            return float(trainer.strategy.reduce(torch.tensor(norm), reduce_op="mean"))

        self.balance.update(trainer.global_step, terms, self.parameters(), mean)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["balance"] = self.balance.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "balance" in checkpoint:
            self.balance.load_state_dict(checkpoint["balance"])

    def _staged_step(self, stages: PipelineTrainer, batch: Batch) -> Tensor:
        """Runs the forward and backward passes through all stages; the returned loss has no autograd graph."""
        whole, accumulated = loss_counts(batch), self.trainer.accumulate_grad_batches
        own_share: Any = batch.get("shares", dict.fromkeys(whole, 1.0))
        names = [name for name in ("labels", "attention_mask", "positions") if name in batch]
        signals = self.signals_of(batch)
        facts = self._facts(signals)
        targets = {name: batch[name] for name in names} | {"signals": by_row(batch, signals)}

        def loss(logits: Tensor, part: Mapping[str, Any]) -> Tensor:
            own = {name: value for name, value in part.items() if name != "signals"}
            given = {name: torch.cat(list(rows)) for name, rows in part["signals"].items()} | facts
            terms = loss_terms(
                self.now, rows_of(own, logits, 2), rows_of(own, own["labels"], 1), own["attention_mask"], given
            )
            shares = {name: count / max(whole[name], 1) * own_share[name] for name, count in loss_counts(own).items()}
            return weighted_sum(self.now, scale_by_share(self.loss, terms, shares)) / accumulated

        total = stages.step(batch, targets, loss).sum() * accumulated
        if self._is_logged():
            self._log_terms(total, {})
        return total

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Zeroes the gradients, except in a pipeline: Lightning calls this between the step and the backward pass, when
        the gradients of a pipeline are already computed.
        """
        if self.stages is None:
            optimizer.zero_grad()

    def _is_logged(self) -> bool:
        trainer: Any = self._trainer
        # Lightning passes values to its loggers only in the step before each multiple and drops all others.
        return trainer is not None and (trainer.global_step + 1) % trainer.log_every_n_steps == 0

    def _log_terms(self, total: Tensor, terms: dict[str, Tensor]) -> None:
        if not total.isfinite():
            raise InputError(
                f"train: the loss is {total.item()} in step {self.trainer.global_step}: nothing is learnt from here; "
                "lower the learning rate or look for extreme values in the teacher's signals"
            )
        values: dict[str, Any] = {"train/loss": total.detach(), "lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        shares = self._gradient_shares(terms)
        for name, value in terms.items():
            values[f"train/{name}"] = value.detach()
            values[f"train/{name}_weight"] = getattr(self.now, name)
            if name in shares:
                values[f"train/{name}_gradient_share"] = shares[name]
        values |= {f"train/matched_{s}": t for s, t in self.taught.matched if s}
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "wait_share"):
            values["train/wait_share"] = data.wait_share()
        if self.on_policy is not None:
            values["train/generation_share"] = self.on_policy.writing.share()
        self.log_dict(values, sync_dist=self.trainer.world_size > 1)

    def _gradient_shares(self, terms: dict[str, Tensor]) -> dict[str, float]:
        """Returns the terms' gradient shares; empty for sharded weights, where a backward pass of a single term would
        reduce the gradients a second time.
        """
        # DeepSpeed marks sharded parameters with ds_id.
        if not terms or any(isinstance(each, DTensor) or hasattr(each, "ds_id") for each in self.parameters()):
            return {}
        return gradient_shares(self.now, terms, self.parameters())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.metric is None and not self.loss.of_labels:
            terms = self.terms(batch)
            self.val_loss.update(weighted_sum(self.now, terms), batch["attention_mask"].sum())
            self.log("val/loss", self.val_loss, on_epoch=True)
            return
        out = self(batch) if self.stages is None else PipelineForward(self.stages.stage, self.stages.group)(batch)
        said = find_logits(out)
        assert said is not None
        logits, labels = self.answers.logits(batch, said), self.answers.labels(batch)
        rows = int((labels != IGNORED).sum())
        if labels.dim() == 1:  # otherwise labels mark the pairs of texts, and there is no loss per row
            self.val_loss.update(label_loss(logits, labels), rows)
            self.log("val/loss", self.val_loss, on_epoch=True, batch_size=rows)
        if self.metric is not None:
            self.metric.update(logits, labels)
            self.log("val/score", self.metric, on_epoch=True, batch_size=rows)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.stages is not None:
            self.stages.average_gradients()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clips by the gradient norm over all processes for every layout of the weights, unless the strategy clips
        gradients itself.
        """
        if getattr(self.trainer.strategy, "clips_gradients", False):
            return
        if gradient_clip_val and self.stages is not None:
            self.stages.clip_gradients(float(gradient_clip_val))
        elif gradient_clip_val:
            clip_gradients(self.parameters(), float(gradient_clip_val))

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(
            self.student,
            self.taught.parameters(),
            self.train_config,
            shard=self.shard_optimizer,
            make=self.make_optimizer,
        )
        self.steps = int(self.trainer.estimated_stepping_batches)
        schedule = build_schedule(optimizer, self.train_config, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
