"""The plain training step: the loss terms of a batch, from the student's outputs and the teacher's signals."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from distill.checkpoint.outputs import find_logits
from distill.data.batches.encode import Batch
from distill.data.batches.segments import ROW_MASK
from distill.losses.compose import compute_loss_terms, scale_by_share
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import AttentionVectors, TeacherSignals
from distill.models.attention import capture_attention_vectors
from distill.models.context import share_masks
from distill.models.inputs import build_inputs, forgo_cache
from distill.models.output_head import restrict_logits
from distill.tasks.logit_rows import OutputRows
from distill.train.steps.batch_entries import find_shares
from distill.train.steps.fused import FusedTerm
from distill.train.steps.layer_terms import LayerTerms
from distill.train.steps.progressive import stop_after_layer
from distill.train.steps.signals import find_distribution_settings

_Mean = Callable[[Tensor], Tensor]  # averages over the processes


@dataclass(frozen=True)
class PlainStep:
    """The loss terms of a batch in which student and teacher have the same tokens.

    Args:
        student: The model that is trained.
        loss: Enabled terms.
        layer_terms: Pairs of layers that the terms compare.
        output_rows: Defines a row.
        fused_term: Computes `kl` or `ce` without the student's logits where possible.
    """

    student: PreTrainedModel
    loss: LossConfig
    layer_terms: LayerTerms
    output_rows: OutputRows
    fused_term: FusedTerm

    def compute_terms(
        self, batch: Batch, signals: TeacherSignals, loss: LossConfig, mean: _Mean | None = None
    ) -> dict[str, Tensor]:
        """Returns the unweighted values of the terms, scaled by the batch's `shares` if there are any.

        Args:
            batch: Padded batch with labels.
            signals: The teacher's signals for the batch.
            loss: Settings of the terms in this step.
            mean: Averages over the processes; None in a single process.
        """
        can_fuse = (mean is None or ROW_MASK in batch) and not self.layer_terms.active_layer
        with self.fused_term.capture(batch, signals) if can_fuse else nullcontext() as head_inputs:
            logits, hidden, vectors = self._run_student(batch)
        device = batch["attention_mask"].device
        tensors = {name: value.to(device) for name, value in signals.items() if isinstance(value, Tensor)}
        outputs = cast(TeacherSignals, tensors)  # the signals without those on layers

        def average_distances(distances: Tensor) -> Tensor:
            if mean is None:
                return distances
            return mean(distances * (find_shares(batch) or {"tokens": 1.0})["tokens"])

        pairs = self.layer_terms.build_pairs(batch["attention_mask"], hidden, vectors, signals, average_distances)
        if logits is not None and self.loss.uses_vectors:
            pairs |= self.layer_terms.build_vector_pairs(logits, outputs)
        rows, labels, teacher_rows = None, None, TeacherSignals()
        if logits is not None and self.loss.uses_logits:
            settings = find_distribution_settings(self.student, signals)
            teacher_rows = self.output_rows.signals(batch, outputs | settings)
            if head_inputs is None:
                rows, labels = self.output_rows.logits(batch, logits), self.output_rows.labels(batch)
                if "row_weights" in batch:
                    rows = weigh_gradients(rows, batch["row_weights"], self.output_rows.counts(batch))
        texts = batch.get("documents", batch["attention_mask"])
        terms = compute_loss_terms(loss, rows, labels, texts, teacher_rows, pairs)
        if head_inputs is not None:
            terms = self.fused_term.compute(head_inputs[0], batch, teacher_rows, loss.resolved_temperature) | terms
        shares = find_shares(batch)
        return terms if shares is None else scale_by_share(self.loss, terms, shares)

    def _run_student(self, batch: Batch) -> tuple[Tensor | None, Sequence[Tensor], Sequence[AttentionVectors]]:
        """Returns the student's logits, hidden states and attention vectors that the terms need."""
        pairs, active_layer = self.layer_terms.layer_pairs, self.layer_terms.active_layer
        capture: AbstractContextManager[list[AttentionVectors]] = (
            capture_attention_vectors(self.student) if pairs.attention_layers else nullcontext([])
        )
        with capture as vectors:
            if active_layer:
                with stop_after_layer(self.student, active_layer) as states:
                    run_student(self.student, batch)
                return None, states, vectors
            output = run_student(self.student, batch, output_hidden_states=bool(pairs.hidden))
        return find_logits(output), output["hidden_states"] if pairs.hidden else (), vectors


def weigh_gradients(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns the rows unchanged; the gradient of each is multiplied by the weight of its sample.

    Args:
        rows: Logits [rows, classes].
        weights: Of each sample [samples].
        counts: Number of rows of each sample.
    """
    factors = weights.to(rows).repeat_interleave(torch.tensor(counts, device=rows.device))[:, None]
    return rows.detach() + (rows - rows.detach()) * factors


def run_student(student: PreTrainedModel, batch: Batch, **settings: bool) -> ModelOutput:
    """Returns the student's output; vocabulary logits only at the requested positions, [rows, vocabulary]."""
    with restrict_logits(student, batch), share_masks(batch):
        output: ModelOutput = student(**build_inputs(student, batch), **forgo_cache(student, batch), **settings)
    return output
