"""The LightningModule that trains a student on a weighted sum of objectives with signals from a teacher."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal, cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion, OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric, Metric
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from distill.checkpoint.norm_kinds import BATCHNORM
from distill.checkpoint.outputs import read_logits
from distill.data.batches.encode import Batch
from distill.errors import InputError
from distill.losses.compose import weighted_sum
from distill.losses.config import DYNAMIC, LayerSizes, LossConfig
from distill.losses.logits import IGNORED, label_loss
from distill.losses.teacher_signals import TeacherSignals
from distill.models.short_attention import attend_to_short_texts
from distill.parallel.apply import keep_layer_gathered
from distill.parallel.clip import clip_gradients
from distill.parallel.pipeline import PipelineForward, PipelineTrainer
from distill.parallel.pipeline_stage import freeze_embeddings
from distill.tasks.logit_rows import OutputRows
from distill.train.activation_checkpointing import checkpoint_layers
from distill.train.averaging import set_optimizer_mode
from distill.train.balance import BalanceState, GradientBalance
from distill.train.batch_growth import NOISE, BatchGrowth
from distill.train.config import TrainConfig
from distill.train.logged_values import (
    TermValues,
    check_finite_loss,
    collect_run_values,
    collect_term_values,
    is_logging_step,
)
from distill.train.offload import ActivationOffload
from distill.train.optimizer import build_optimizer, set_dropout
from distill.train.rate_control import RateControl
from distill.train.schedule import build_schedule, set_schedule_step
from distill.train.spike_watch import SpikeWatch
from distill.train.steps.backward_window import BackwardWindow, yield_windows
from distill.train.steps.cross_tokenizer import CrossTokenizerKL
from distill.train.steps.fused import FusedTerm
from distill.train.steps.layer_terms import build_layer_terms
from distill.train.steps.micro_batches import MicroBatches
from distill.train.steps.on_policy import OnPolicy, check_on_policy
from distill.train.steps.pipeline import train_stages
from distill.train.steps.plain import PlainStep, run_student
from distill.train.steps.signals import SignalReader, find_distribution_settings, read_signals


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
        cross_tokenizer: Computes `kl` in place of `signals` where the teacher has a different tokenizer.
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
        signals: SignalReader | None = None,
        metric: Metric | None = None,
        output_rows: OutputRows | None = None,
        teacher_sizes: LayerSizes | None = None,
        shard_optimizer: bool = False,
        stages: PipelineTrainer | None = None,
        on_policy: OnPolicy | None = None,
        cross_tokenizer: CrossTokenizerKL | None = None,
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
        self.on_policy, self.cross_tokenizer = on_policy, cross_tokenizer
        self.fused_term = FusedTerm(student, loss, self.output_rows)
        self.stochastic_rounding = False  # of updates, where the weights are bfloat16
        self.layer_terms = build_layer_terms(loss, student, teacher_sizes, is_pipeline=stages is not None)
        self.settings_in_training = ExitStack()  # of the student's memory and attention
        self.offload: ActivationOffload | None = None  # in training
        self.scratch = Path(gettempdir())  # for temporary files
        self.rate_control, self.spikes = RateControl(), SpikeWatch(train.spike)
        self.micro_batches, self.growth = MicroBatches(), BatchGrowth(train)
        self.total_steps = 1  # optimizer steps of the entire training
        self.balance = GradientBalance(loss.balance_every)
        if train.freeze_embeddings:
            freeze_embeddings(student)

    def forward(self, batch: Batch, **settings: bool) -> ModelOutput:
        """Returns the student's output; vocabulary logits only at the requested positions, [rows, vocabulary]."""
        return run_student(self.student, batch, **settings)

    def on_fit_start(self) -> None:
        """Puts the student into training mode, with the configured dropout and memory settings and the CPU's attention.

        Raises:
            InputError: A backward window with several processes, or with a model that can't be trained in chunks.
        """
        if self.train_config.backward_window:
            self._check_backward_window()
        self.student.train()  # transformers loads models in eval mode, and Lightning does not change the mode
        if self.train_config.dropout is not None:
            set_dropout(self.student, self.train_config.dropout)
        if self._trainer is not None and self.trainer.strategy.root_device.type == "cpu":
            self.settings_in_training.enter_context(attend_to_short_texts())
        self.settings_in_training.enter_context(checkpoint_layers(self.student, self.train_config.checkpointing))
        deepest = self.layer_terms.deepest_inner_layer
        if deepest is not None and not self.loss.trains_every_parameter:
            keep_layer_gathered(self.student, deepest)

    def on_train_start(self) -> None:
        """Gives a resumed training its accumulation, and the rate of its step.

        Lightning calls no `on_train_epoch_start` when it resumes within an epoch, and a checkpoint from before a spike
        has another rate.
        """
        self._accumulate_batches()
        self._set_optimizer_mode("train")  # a checkpoint may be that of a validation
        if self.spikes.rate_factor != 1:
            for scheduler in (cast(LambdaLR, each.scheduler) for each in self.trainer.lr_scheduler_configs):
                set_schedule_step(scheduler, scheduler.last_epoch)

    def configure_callbacks(self) -> list[Callback]:
        """Returns what Lightning adds to the trainer's callbacks."""
        return [_EndOnError()]

    def on_fit_end(self) -> None:
        """Ends activation checkpointing, offload and the settings of attention."""
        self.settings_in_training.close()
        self.offload = None

    def compute_terms(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the unweighted values of the terms on a batch.

        Those of a process's share of a batch are scaled by `shares`.

        Raises:
            InputError: The signals of a term are missing or not finite.
        """
        with self._offload_activations(batch):
            if self.cross_tokenizer is not None:
                return self.cross_tokenizer.compute_terms(self.student, self.loss, batch)
            step = PlainStep(self.student, self.loss, self.layer_terms, self.output_rows, self.fused_term)
            return step.compute_terms(batch, self.read_signals(batch), self.current_loss, self._process_mean)

    def _offload_activations(self, batch: Batch) -> AbstractContextManager[None]:
        if self.train_config.offload == "none" or not torch.is_grad_enabled():
            return nullcontext()
        if self.offload is None:  # the batch is where the model computes, which weights need not be
            self.offload = ActivationOffload(batch["attention_mask"].device, self.scratch)
        return self.offload.offload(chain(self.parameters(), self.buffers()), batch)

    def read_signals(self, batch: Batch) -> TeacherSignals:
        """Returns the teacher's signals for a batch.

        Raises:
            InputError: The signals of a term are missing.
        """
        return read_signals(batch, self.signals, self.loss, self.layer_terms)

    @property
    def _process_mean(self) -> Callable[[Tensor], Tensor] | None:
        """Averages a tensor over the processes; None in a single process."""
        if self._trainer is None or self._trainer.world_size == 1:
            return None
        return partial(self._trainer.strategy.reduce, reduce_op="mean")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the weighted sum of the terms on a batch, and logs it in the steps in which Lightning logs.

        Returns:
            For the batches of a step that has one of `spikes.skipped_batches`, a zero without gradients.

        Raises:
            InputError: The loss isn't finite in a step that logs.
        """
        self.spikes.start_batch(self._trainer, batch_idx)
        self._clear_gradients(batch_idx)
        if self.spikes.is_skipping:
            return torch.zeros((), device=self.device, requires_grad=True)
        is_logged, values = is_logging_step(self._trainer), TermValues()
        if self.stages is not None:
            total = self._train_stages(self.stages, batch)
        elif self.splits_batches:
            total, values = self._train_micro_batches(batch, batch_idx, is_logged=is_logged)
        else:
            total, terms = self.compute_loss(self._select_batch(batch))
            values = self._collect_values(terms) if is_logged else values
        if self.train_config.recoveries:
            self.spikes.observe_loss(self.trainer, self.student, total, batch_idx)
        if is_logged and self.spikes.spike is None:
            self._log_step(total, values)
        return total

    def compute_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weighted sum of the terms on a batch, and the terms."""
        terms = self.compute_terms(batch)
        self._balance_gradients(terms)
        return weighted_sum(self.current_loss, terms), terms

    @property
    def splits_batches(self) -> bool:
        """Whether a batch that doesn't fit into memory can be trained in parts, with a backward pass for each.

        Several processes would have to agree on the parts, and some terms, and batch norms, compare the rows of a
        batch.
        """
        trainer = self._trainer
        return trainer is not None and getattr(trainer.strategy, "splits_batches", False) and self.can_split_batches

    @property
    def can_split_batches(self) -> bool:
        """Whether the loss of a batch is the sum of those of its parts."""
        compares_rows = self.loss.computes("similarity") or self.loss.layer_map == DYNAMIC or self.loss.balance_every
        compares_rows = compares_rows or BATCHNORM in getattr(self.student.config, "norms", {}).values()
        return not compares_rows and self.cross_tokenizer is None and self.on_policy is None and self.stages is None

    def _train_micro_batches(self, batch: Batch, batch_idx: int, *, is_logged: bool) -> tuple[Tensor, TermValues]:
        """Runs the forward and backward passes of a batch in parts; returns its loss and the logged values.

        Shares of the gradient are those of the first part.
        """
        accumulated, step = self.trainer.accumulate_grad_batches, self.trainer.global_step
        measured: list[TermValues] = []

        def compute(part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            total, terms = self.compute_loss(part)
            if is_logged and not measured:
                measured.append(self._collect_values(terms))
            return total, terms

        total, terms = self.micro_batches.run(
            batch,
            compute,
            lambda loss: self.trainer.strategy.backward(loss / accumulated, None),
            self.parameters(),
            lambda parts: rank_zero_warn(
                f"memory ran out in step {step}: batches are trained in {parts} parts from here on, with the same loss"
            ),
            self.divide_batch,
        )
        self._measure_noise(batch_idx)
        values: TermValues = {f"train/{name}": value for name, value in terms.items()}
        return total.requires_grad_(), (measured[0] | values if measured else TermValues())

    def divide_batch(self, batch: Batch) -> Iterable[Batch]:
        """Returns the chunks of a batch whose backward passes are separate; see `backward_window`."""
        if not self.train_config.backward_window:
            return (batch,)
        return self._backward_window.divide(batch, self.read_signals)

    @property
    def _backward_window(self) -> BackwardWindow:
        signals = self.signals if self.loss.needs_teacher else None
        return BackwardWindow(self.train_config.backward_window, self.student, signals)

    def _check_backward_window(self) -> None:
        self._backward_window.check_models()
        if self._trainer is None or self.splits_batches:
            return
        found = f"the strategy {type(self.trainer.strategy).__name__}" if self.can_split_batches else "terms that do"
        raise InputError(
            "train.backward_window: expected terms that don't compare rows, and one process with a strategy that "
            f"splits batches, as in a run of pipelines.distill, found {found}: whole documents would be trained"
        )

    def _collect_values(self, terms: dict[str, Tensor]) -> TermValues:
        return collect_term_values(self.current_loss, terms, self)

    def _clear_gradients(self, batch_idx: int) -> None:
        """Removes the last step's gradients where `optimizer_zero_grad` doesn't."""
        has_own_backward = self.stages is not None or self.splits_batches
        if has_own_backward and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.zero_grad()

    def _train_stages(self, stages: PipelineTrainer, batch: Batch) -> Tensor:
        accumulated = self.trainer.accumulate_grad_batches
        signals = self.read_signals(batch)
        settings = find_distribution_settings(self.student, signals)
        return train_stages(stages, batch, signals, settings, self.current_loss, accumulated)

    def _select_batch(self, batch: Batch) -> Batch:
        """Returns the batch of the step: the dataset's, or one of generated sequences."""
        if self.on_policy is None:
            return batch
        step = 0 if self._trainer is None else self._trainer.global_step
        return self.on_policy.build_batch(self.student, step, batch, self._process_mean or torch.clone)

    @property
    def current_loss(self) -> LossConfig:
        """The loss settings of the current step: ramps and gradient balancing applied."""
        trainer = self._trainer
        progress = 0.0 if trainer is None or not self.loss.ramps else self._count_steps() / max(1, self.total_steps - 1)
        return self.balance.scale_weights(self.loss.interpolate_ramps(min(1.0, progress)))

    @property
    def grows(self) -> bool:
        """Whether the effective batch grows during the training."""
        return self.train_config.batch_growth != "none"

    def _count_steps(self) -> int:
        """Returns the optimizer steps so far, or those that there would have been without growing batches."""
        return self.growth.steps if self.grows else self.trainer.global_step

    def on_train_epoch_start(self) -> None:
        """Sets the number of accumulated batches of the epoch."""
        self._accumulate_batches()

    def _accumulate_batches(self) -> None:
        if self.grows:
            self.growth.start_epoch(self.trainer.current_epoch)
            self.trainer.accumulate_grad_batches = self.growth.accumulated

    def on_after_backward(self) -> None:
        """Ends the training at a spike; otherwise measures the noise of the gradient, except in micro-batches.

        In these, the gradients of earlier batches are apart. A spike waits until here because sharded weights and their
        gradients are in order only after a backward pass.

        Raises:
            LossSpikeError: The loss is a spike, where `recoveries` are allowed.
        """
        self.spikes.raise_if_found()
        if not (self.splits_batches or self.spikes.is_skipping):
            self._measure_noise(self.trainer.fit_loop.batch_idx)

    def _measure_noise(self, batch_idx: int) -> None:
        """Measures the noise of the gradient, if the batch is the first or the last one of an accumulation."""
        number = batch_idx % self.growth.accumulated
        if self.train_config.batch_growth == NOISE and number in (0, self.growth.accumulated - 1):
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self.growth.observe_batch(float(torch.nn.utils.get_total_norm(gradients)) ** 2, number)

    def lr_scheduler_step(self, scheduler: LRSchedulerTypeUnion, metric: object) -> None:
        """Advances the schedule by the steps that there would have been without growing batches."""
        for _ in range(self.growth.factor):
            super().lr_scheduler_step(scheduler, metric)
        self.growth.steps += self.growth.factor

    def _balance_gradients(self, terms: dict[str, Tensor]) -> None:
        trainer = self._trainer
        if trainer is None or not self.balance.interval:
            return

        def mean(norm: float) -> float:
            return float(trainer.strategy.reduce(torch.tensor(norm), reduce_op="mean"))

        self.balance.update(trainer.global_step, terms, self.parameters(), mean)

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Adds the states of gradient balancing, learning rate, batch growth and micro-batches, and the last losses."""
        checkpoint["growth"] = self.growth.state_dict()
        checkpoint["balance"] = self.balance.state_dict()
        checkpoint["rate_control"] = self.rate_control.state_dict()
        checkpoint["losses"] = list(self.spikes.detector.losses)
        checkpoint["micro_batches"] = self.micro_batches.parts

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Restores what `on_save_checkpoint` added."""
        if "growth" in checkpoint:
            self.growth.load_state_dict(cast(dict[str, float], checkpoint["growth"]))
        if "balance" in checkpoint:
            self.balance.load_state_dict(cast(BalanceState, checkpoint["balance"]))
        self.micro_batches.parts = int(cast(int, checkpoint.get("micro_batches", 1)))
        self.spikes.detector.restore(cast(list[float], checkpoint.get("losses", [])))
        if "rate_control" in checkpoint:
            self.rate_control.load_state_dict(cast(dict[str, object], checkpoint["rate_control"]))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zeroes the gradients, except where they are already computed.

        Lightning calls this between the step and its backward pass, but a pipeline and micro-batches have theirs in the
        step.
        """
        if self.stages is None and not self.splits_batches:
            optimizer.zero_grad()

    def _find_rate_factor(self) -> float:
        return self.rate_control.factor * self.spikes.rate_factor * self.growth.rate_factor

    def _log_step(self, total: Tensor, term_values: TermValues) -> None:
        check_finite_loss(total, self.trainer.global_step)
        values: TermValues = {"train/loss": total.detach(), **term_values}
        values |= collect_run_values(self.trainer, self.layer_terms)
        if self.on_policy is not None:
            values["train/generation_share"] = self.on_policy.generation_time.measure_share()
        if self.grows:
            values["train/batch_rows"] = float(self.train_config.rows * self.growth.accumulated)
            values["train/noise_scale"] = min(self.growth.noise.rows, torch.finfo(torch.float32).max)
        self.log_dict(values, sync_dist=self.trainer.world_size > 1)

    def on_validation_start(self) -> None:
        """Gives the student the averaged weights, if there are any: `train.ema_decay`, or schedule-free's own."""
        self._set_optimizer_mode("eval")

    def on_validation_end(self) -> None:
        """Gives the student the weights that are trained, and lowers the learning rate on a plateau."""
        self._set_optimizer_mode("train")
        if self.train_config.schedule == "plateau" and not self.trainer.sanity_checking and self.trainer.optimizers:
            metrics = self.trainer.callback_metrics
            value = metrics["val/score"] if "val/score" in metrics else -metrics["val/loss"]
            if self.rate_control.observe_validation(float(value), self.train_config):
                self.rate_control.falls.append((self.trainer.global_step, self.rate_control.factor))

    def on_train_end(self) -> None:
        """Leaves the student with the averaged weights."""
        self._set_optimizer_mode("eval")

    def _set_optimizer_mode(self, mode: Literal["train", "eval"]) -> None:
        for optimizer in self.trainer.optimizers:
            set_optimizer_mode(optimizer, mode)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the loss and the score of a batch of the validation split; without labels the sum of the terms."""
        if self.metric is None and not self.loss.uses_logits:
            terms = self.compute_terms(batch)
            self.val_loss.update(weighted_sum(self.current_loss, terms), batch["attention_mask"].sum())
            self.log("val/loss", self.val_loss, on_epoch=True)
            return
        window = self.train_config.backward_window
        parts = yield_windows(batch, window, self) if window else (batch,)
        labels = torch.cat([self._update_validation(part) for part in parts])
        rows = int((labels != IGNORED).sum())
        if labels.dim() == 1:
            self.log("val/loss", self.val_loss, on_epoch=True, batch_size=rows)
        if self.metric is not None:
            self.log("val/score", self.metric, on_epoch=True, batch_size=rows)

    def _update_validation(self, batch: Batch) -> Tensor:
        """Adds a batch to the loss and the score of the validation; returns its labels."""
        output = self(batch) if self.stages is None else PipelineForward(self.stages.stage, self.stages.group)(batch)
        logits, labels = self.output_rows.logits(batch, read_logits(output)), self.output_rows.labels(batch)
        if labels.dim() == 1:  # otherwise labels mark the pairs of texts, and there is no loss per row
            self.val_loss.update(label_loss(logits, labels), int((labels != IGNORED).sum()))
        if self.metric is not None:
            self.metric.update(logits, labels)
        return labels

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Takes the optimizer's step, and none after batches that are skipped, which have no gradients."""
        if optimizer_closure is not None and self.spikes.is_step_skipped(self.trainer, batch_idx):
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Averages gradients of a pipeline's replicas, and of parameters outside a sharded student."""
        average = getattr(self.trainer.strategy, "average_plain_gradients", None)
        if self.stages is not None:
            self.stages.average_gradients()
        elif average is not None:
            average()

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

    def build_optimizer(self) -> Optimizer:
        """Returns the optimizer of the student and of the projections of layer terms."""
        return build_optimizer(
            self.student,
            self.layer_terms.parameters(),
            self.train_config,
            shard=self.shard_optimizer,
            stochastic_rounding=self.stochastic_rounding,
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns the optimizer and its schedule over the entire training."""
        self.total_steps = int(self.trainer.estimated_stepping_batches)
        optimizer = self.build_optimizer()
        schedule = build_schedule(optimizer, self.train_config, self.total_steps, self._find_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _EndOnError(Callback):
    """Calls `on_fit_end`, which Lightning omits when a training ends by an error."""

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        pl_module.on_fit_end()
