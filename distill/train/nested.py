"""Training of a model together with slices of its weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_stack
from distill.data.batches.encode import Batch
from distill.losses.compose import weighted_sum
from distill.slicing import Axis, Shape, prune
from distill.slicing.nested import ModelSlice
from distill.train.module import DistillationModule
from distill.train.optimizer import set_dropout
from distill.train.steps.plain import PlainStep

EXTRA_WORK = 0.3  # of the slices, as a share of the largest model's


class SlicedStep(nn.Module):
    """The loss terms of a slice; called by `torch.func.functional_call` with the slice's weights."""

    def __init__(self, student: PreTrainedModel):
        super().__init__()
        self.student = student

    def forward(self, module: DistillationModule, batch: Batch) -> dict[str, Tensor]:
        """Returns the terms of a batch."""
        step = PlainStep(self.student, module.loss, module.layer_terms, module.output_rows, module.fused_term)
        return step.compute_terms(batch, module.read_signals(batch), module.current_loss)


class NestedModule(DistillationModule):
    """Trains the student and, in each step, at most one slice of its weights on the same batch and signals.

    Slices take turns, in as many steps as keep their forward and backward passes within EXTRA_WORK of the student's.
    The step's number decides which one, so that a resumed training goes on as one that wasn't stopped.

    Args:
        student: The largest model.
        axes: Its axes.
        shapes: Shapes of the slices.
        settings: As in `DistillationModule`.

    Source: the sandwich rule of Yu and Huang 2019 (arXiv 1903.05134, section 3.2) trains the largest, the smallest and
        random widths in each step, for several times the work; here the largest and one other. Slices learn from the
        teacher, as the largest does, not from the largest. Norms are shared, as in HAT (Wang et al. 2020, arXiv
        2005.14187): Yu et al. 2019 (arXiv 1812.08928) need norms apart because of batch norms' running statistics,
        which the layer norms of transformers don't have.
    """

    def __init__(self, student: PreTrainedModel, *, axes: Sequence[Axis], shapes: Sequence[Shape], **settings: Any):
        super().__init__(student, **settings)
        self.slices = [ModelSlice.of(student, axes, shape) for shape in shapes]
        # In a list, because their own weights are never used: neither optimizer nor checkpoint may find them.
        self.steps = [SlicedStep(prune(student, axes, shape)) for shape in shapes]
        work = [measure_work(step.student) / measure_work(student) for step in self.steps]
        self.share = min(1.0, EXTRA_WORK * len(work) / sum(work))  # of the steps, in which a slice is trained
        self.largest = work.index(max(work))  # number of the largest slice

    def on_fit_start(self) -> None:
        """Puts student and slices into training mode, on the same device."""
        super().on_fit_start()
        for step in self.steps:
            step.to(self.student.device).train()
            if self.train_config.dropout is not None:
                set_dropout(step.student, self.train_config.dropout)

    def compute_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weighted sum of the student's terms, with the gradient of the step's slice added, and the terms.

        The value is the student's alone, so that logs and the detection of spikes don't depend on whose turn it is.
        Without a trainer, as in measurements before the training, it is the largest slice, which takes the most memory.
        """
        total, terms = super().compute_loss(batch)
        number = self.largest if self._trainer is None else self.choose_slice(self._trainer.global_step)
        if number is None:
            return total, terms
        loss = self.compute_slice_loss(number, batch)
        return total + (loss - loss.detach()), terms

    def choose_slice(self, step: int) -> int | None:
        """Returns the number of the slice that is trained in a step; None if none is."""
        turn = int(step * self.share)
        return turn % len(self.slices) if int((step + 1) * self.share) > turn else None

    def compute_slice_loss(self, number: int, batch: Batch) -> Tensor:
        """Returns the weighted sum of the terms of a slice, a function of the student's weights."""
        weights = self.slices[number].cut(dict(self.student.named_parameters()))
        named = {f"student.{name}": weight for name, weight in weights.items()}
        terms: dict[str, Tensor] = torch.func.functional_call(self.steps[number], named, (self, batch))
        return weighted_sum(self.current_loss, terms)


def measure_work(model: PreTrainedModel) -> int:
    """Returns the number of weights in a model's layers, to which its operations on a token are proportional."""
    return sum(each.numel() for each in model.get_submodule(find_layer_stack(model)).parameters())
