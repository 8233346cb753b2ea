"""The LightningModule that trains a student on a weighted sum of objectives with signals from a teacher."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric, Metric
from transformers import PreTrainedModel

from distill.checkpoint.outputs import find_logits, logits_of
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import IGNORED, Batch
from distill.errors import InputError
from distill.losses.compose import compute_gradient_shares, compute_loss_terms, scale_by_share, weighted_sum
from distill.losses.config import LAYER_TERMS, LayerSizes, LossConfig
from distill.losses.logits import label_loss
from distill.losses.teacher_signals import AttentionVectors, TeacherSignals
from distill.models.attention import capture_attention_vectors
from distill.models.inputs import build_inputs, select_inputs
from distill.models.layer_sizes import read_layer_sizes
from distill.models.output_head import count_vocabulary_classes, restrict_logits
from distill.parallel.clip import clip_gradients
from distill.parallel.pipeline import PipelineForward, PipelineTrainer
from distill.parallel.pipeline_stage import freeze_embeddings
from distill.tasks.logit_rows import OutputRows, facts_of, rows_of
from distill.train.balance import BalanceState, GradientBalance
from distill.train.config import TrainConfig
from distill.train.layer_terms import LayerTerms
from distill.train.optimizer import build_optimizer, build_schedule, set_dropout
from distill.train.steps.across_tokenizers import CrossTokenizerKL
from distill.train.steps.batch_entries import find_shares, find_signals
from distill.train.steps.fused import FusedKL
from distill.train.steps.on_policy import OnPolicy, check_on_policy
from distill.train.steps.pipeline import train_stages
from distill.train.steps.progressive import stop_after_layer
from distill.train.steps.signals import check_signals


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
        output_rows: Defines a row. By default a row is a sample, or a position if the student outputs logits for every
            token.
        teacher_sizes: Sizes of the teacher as returned by `read_layer_sizes`, for the terms on layers and vectors.
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
        signals: Callable[[Batch], Mapping[str, object]] | None = None,
        metric: Metric | None = None,
        output_rows: OutputRows | None = None,
        teacher_sizes: LayerSizes | None = None,
        shard_optimizer: bool = False,
        stages: PipelineTrainer | None = None,
        on_policy: OnPolicy | None = None,
        across: CrossTokenizerKL | None = None,
    ):
        super().__init__()
        if on_policy is not None:
            teacher_config = getattr(getattr(signals, "model", None), "config", None)
            on_policy.teacher_config = on_policy.teacher_config or teacher_config
            check_on_policy(on_policy, student, loss, signals, is_pipeline=stages is not None)
        loss = replace(loss, temperature=loss.resolved_temperature)
        self.student, self.loss, self.train_config, self.signals, self.metric = student, loss, train, signals, metric
        self.output_rows = output_rows or OutputRows()
        self.val_loss, self.shard_optimizer, self.stages = MeanMetric(), shard_optimizer, stages
        self.on_policy, self.across, self.fused_kl = on_policy, across, FusedKL(student, loss, self.output_rows)
        self.make_optimizer: Callable[..., Optimizer] | None = None  # replaces AdamW, called with the same arguments
        self.layer_terms = self._build_layer_terms(teacher_sizes)
        self.total_steps, self.balance = 1, GradientBalance(loss.balance)  # optimizer steps of the entire training
        if train.freeze_embeddings:
            freeze_embeddings(student)

    def _build_layer_terms(self, teacher_sizes: LayerSizes | None) -> LayerTerms:
        enabled = [name for name in LAYER_TERMS if getattr(self.loss, name)]
        if (enabled or self.loss.uses_vectors) and self.stages is not None:
            name = enabled[0] if enabled else "embedding"
            raise InputError(
                f"loss.{name}: expected weight 0 with a student in pipeline stages, found "
                f"{getattr(self.loss, name):g}: no process has all its layers; use kl"
            )
        if enabled and teacher_sizes is None:
            raise InputError(
                f"loss.{enabled[0]}: expected the sizes of the teacher, found none: layers can't be matched; pass "
                "teacher_sizes"
            )
        sizes = read_layer_sizes(self.student.config)
        return LayerTerms(self.loss, sizes, LayerSizes(*teacher_sizes) if teacher_sizes else sizes)

    def forward(self, batch: Batch, **settings: bool) -> Any:
        """Returns the student's output; vocabulary logits only at the requested positions, [rows, vocabulary]."""
        with restrict_logits(self.student, batch):
            return self.student(**build_inputs(self.student, batch), **settings)

    def on_fit_start(self) -> None:
        """Puts the student into training mode, with the configured dropout."""
        self.student.train()  # transformers loads models in eval mode, and Lightning does not change the mode
        if self.train_config.dropout is not None:
            set_dropout(self.student, self.train_config.dropout)

    def compute_terms(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the unweighted values of the terms on a batch.

        Those of a process's share of a batch are scaled by `shares`.

        Raises:
            InputError: The signals of a term are missing or not finite.
        """
        if self.across is not None:
            return self._compute_terms_across(batch, self.across)
        signals = self._read_signals(batch)
        with self.fused_kl.capture(batch, signals if self._may_fuse else TeacherSignals()) as head_inputs:
            logits, hidden, vectors = self._run_student(batch)
        device = batch["attention_mask"].device
        tensors = {name: value.to(device) for name, value in signals.items() if isinstance(value, Tensor)}
        outputs = cast(TeacherSignals, tensors)  # the signals without those on layers
        mean = partial(self._average_distances, batch)
        pairs = self.layer_terms.build_pairs(batch["attention_mask"], hidden, vectors, signals, mean)
        if logits is not None and self.loss.uses_vectors:
            pairs |= self.layer_terms.build_vector_pairs(logits, outputs)
        rows, labels, teacher_rows = None, None, TeacherSignals()
        if logits is not None and self.loss.uses_logits:
            teacher_rows = self.output_rows.signals(batch, outputs | self._find_facts(signals))
            if head_inputs is None:
                rows, labels = self.output_rows.logits(batch, logits), self.output_rows.labels(batch)
        texts = batch.get("documents", batch["attention_mask"])
        loss = self.current_loss
        terms = compute_loss_terms(loss, rows, labels, texts, teacher_rows, pairs)
        if head_inputs is not None:
            terms = {"kl": self.fused_kl.compute(head_inputs[0], teacher_rows, loss.resolved_temperature)} | terms
        shares = find_shares(batch)
        return terms if shares is None else scale_by_share(self.loss, terms, shares)

    def _compute_terms_across(self, batch: Batch, across: CrossTokenizerKL) -> dict[str, Tensor]:
        logits = self.student(**select_inputs(batch)).logits
        terms = {"kl": across(logits, batch)} if self.loss.kl else {}
        if self.loss.ce:
            terms["ce"] = label_loss(rows_of(batch, logits, 2), rows_of(batch, batch["labels"], 1))
        return terms

    @property
    def _may_fuse(self) -> bool:
        return not self.layer_terms.active_layer and (self._trainer is None or self._trainer.world_size == 1)

    def _average_distances(self, batch: Batch, distances: Tensor) -> Tensor:
        if self._trainer is None or self._trainer.world_size == 1:
            return distances
        share = (find_shares(batch) or {"tokens": 1.0})["tokens"]
        mean: Tensor = self._trainer.strategy.reduce(distances * share, reduce_op="mean")
        return mean

    def _run_student(self, batch: Batch) -> tuple[Tensor | None, Sequence[Tensor], Sequence[AttentionVectors]]:
        """Returns the student's logits, hidden states and attention vectors that the terms need."""
        pairs, active_layer = self.layer_terms.layer_pairs, self.layer_terms.active_layer
        capture: AbstractContextManager[list[AttentionVectors]] = (
            capture_attention_vectors(self.student) if pairs.attention_layers else nullcontext([])
        )
        with capture as vectors:
            if active_layer:
                with stop_after_layer(self.student, active_layer) as states:
                    self(batch)
                return None, states, vectors
            output = self(batch, output_hidden_states=bool(pairs.hidden))
        return find_logits(output), output.hidden_states if pairs.hidden else (), vectors

    def _read_signals(self, batch: Batch) -> TeacherSignals:
        """Returns the teacher's signals for a batch, checked, from the batch itself or by querying `signals`."""
        if not self.loss.needs_teacher:
            return TeacherSignals()
        signals = find_signals(batch)
        if signals is None and self.signals is not None:
            signals = cast(TeacherSignals, self.signals(batch))
        if signals is None:
            raise InputError(
                "loss: expected signals for the terms that read the teacher, found none: pass signals, or batches that "
                "contain them"
            )
        layers = self.layer_terms.find_needed_layers(signals)
        check_signals(signals, batch, layers, outputs=self.loss.kl > 0 or self.loss.uses_vectors)
        return signals

    def _find_facts(self, signals: TeacherSignals) -> TeacherSignals:
        """Returns the temperature of stored distributions and the teacher's number of classes, if there are any."""
        return facts_of(signals) | count_vocabulary_classes(self.student, signals)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the weighted sum of the terms on a batch, and logs it in the steps in which Lightning logs."""
        if self.stages is not None:
            total, terms = self._train_stages(self.stages, batch, batch_idx), {}
        else:
            terms = self.compute_terms(self._select_batch(batch))
            self._balance_gradients(terms)
            total = weighted_sum(self.current_loss, terms)
        if self._is_logged():
            self._log_terms(total, terms)
        return total

    def _train_stages(self, stages: PipelineTrainer, batch: Batch, batch_idx: int) -> Tensor:
        accumulated = self.trainer.accumulate_grad_batches
        if batch_idx % accumulated == 0:
            self.zero_grad()
        signals = self._read_signals(batch)
        return train_stages(stages, batch, signals, self._find_facts(signals), self.current_loss, accumulated)

    def _select_batch(self, batch: Batch) -> Batch:
        """Returns the batch of the step: the dataset's, or one of generated sequences."""
        if self.on_policy is None:
            return batch
        if self._trainer is None:
            return self.on_policy.build_batch(self.student, 0, batch)
        mean = partial(self._trainer.strategy.reduce, reduce_op="mean")
        return self.on_policy.build_batch(self.student, self._trainer.global_step, batch, mean)

    @property
    def current_loss(self) -> LossConfig:
        """The loss settings of the current step: ramps and gradient balancing applied."""
        trainer = self._trainer
        progress = 0.0 if trainer is None or not self.loss.ramps else trainer.global_step / max(1, self.total_steps - 1)
        return self.balance.scale_weights(self.loss.interpolate_ramps(min(1.0, progress)))

    def _balance_gradients(self, terms: dict[str, Tensor]) -> None:
        trainer = self._trainer
        if trainer is None or not self.balance.interval:
            return

        def mean(norm: float) -> float:
            return float(trainer.strategy.reduce(torch.tensor(norm), reduce_op="mean"))

        self.balance.update(trainer.global_step, terms, self.parameters(), mean)

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Adds the state of the gradient balancing."""
        checkpoint["balance"] = self.balance.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Restores the state of the gradient balancing."""
        if "balance" in checkpoint:
            self.balance.load_state_dict(cast(BalanceState, checkpoint["balance"]))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zeroes the gradients, except in a pipeline.

        Lightning calls this between the step and the backward pass, when the gradients of a pipeline are already
        computed.
        """
        if self.stages is None:
            optimizer.zero_grad()

    def _is_logged(self) -> bool:
        trainer = self._trainer
        # Lightning passes values to its loggers only in the step before each multiple and drops all others.
        return trainer is not None and (trainer.global_step + 1) % getattr(trainer, "log_every_n_steps", 1) == 0

    def _log_terms(self, total: Tensor, terms: dict[str, Tensor]) -> None:
        if not total.isfinite():
            raise InputError(
                f"train: expected a finite loss, found {total.item()} in step {self.trainer.global_step}: nothing is "
                "learnt from here on; lower the learning rate or look for extreme values in the teacher's signals"
            )
        learning_rate: float = self.trainer.optimizers[0].param_groups[0]["lr"]
        values: dict[str, Tensor | float] = {"train/loss": total.detach(), "lr": learning_rate}
        gradient_shares = self._compute_gradient_shares(terms)
        for name, value in terms.items():
            values[f"train/{name}"] = value.detach()
            values[f"train/{name}_weight"] = getattr(self.current_loss, name)
            if name in gradient_shares:
                values[f"train/{name}_gradient_share"] = gradient_shares[name]
        values |= {f"train/matched_{s}": t for s, t in self.layer_terms.matched if s}
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, RowsDataModule):
            values["train/wait_share"] = data.wait_share()
        if self.on_policy is not None:
            values["train/generation_share"] = self.on_policy.generation_time.share()
        self.log_dict(values, sync_dist=self.trainer.world_size > 1)

    def _compute_gradient_shares(self, terms: dict[str, Tensor]) -> dict[str, float]:
        """Returns the terms' gradient shares; empty for sharded weights.

        With these, a backward pass of a single term would reduce the gradients a second time.
        """
        # DeepSpeed marks sharded parameters with ds_id.
        if not terms or any(isinstance(each, DTensor) or hasattr(each, "ds_id") for each in self.parameters()):
            return {}
        return compute_gradient_shares(self.current_loss, terms, self.parameters())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the loss and the score of a batch of the validation split; without labels the sum of the terms."""
        if self.metric is None and not self.loss.uses_logits:
            terms = self.compute_terms(batch)
            self.val_loss.update(weighted_sum(self.current_loss, terms), batch["attention_mask"].sum())
            self.log("val/loss", self.val_loss, on_epoch=True)
            return
        output = self(batch) if self.stages is None else PipelineForward(self.stages.stage, self.stages.group)(batch)
        logits, labels = self.output_rows.logits(batch, logits_of(output)), self.output_rows.labels(batch)
        rows = int((labels != IGNORED).sum())
        if labels.dim() == 1:  # otherwise labels mark the pairs of texts, and there is no loss per row
            self.val_loss.update(label_loss(logits, labels), rows)
            self.log("val/loss", self.val_loss, on_epoch=True, batch_size=rows)
        if self.metric is not None:
            self.metric.update(logits, labels)
            self.log("val/score", self.metric, on_epoch=True, batch_size=rows)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Averages the gradients over the replicas of a pipeline."""
        if self.stages is not None:
            self.stages.average_gradients()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by the gradient norm over all processes for every layout of the weights.

        Nothing is done if the strategy clips gradients itself.
        """
        if getattr(self.trainer.strategy, "clips_gradients", False):
            return
        if gradient_clip_val and self.stages is not None:
            self.stages.clip_gradients(float(gradient_clip_val))
        elif gradient_clip_val:
            clip_gradients(self.parameters(), float(gradient_clip_val))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns the optimizer and its schedule over the entire training."""
        optimizer = build_optimizer(
            self.student,
            self.layer_terms.parameters(),
            self.train_config,
            shard=self.shard_optimizer,
            make=self.make_optimizer,
        )
        self.total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = build_schedule(optimizer, self.train_config, self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
