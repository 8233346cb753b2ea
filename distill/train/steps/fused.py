"""Training on labels, or on a sample or the top-k of the teacher's distribution, without the student's full logits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.checkpoint.outputs import find_logits
from distill.data.batches.encode import Batch
from distill.data.batches.loss_mask import loss_mask
from distill.eval_mode import eval_mode
from distill.losses.compose import fused_distribution_loss, fused_label_loss
from distill.losses.config import SPARSE_DIVERGENCES, LossConfig
from distill.losses.fused import matmul_dtype
from distill.losses.teacher_signals import TeacherSignals
from distill.models.inputs import OUTPUT_FIELDS, build_inputs
from distill.models.output_head import find_head
from distill.tasks.logit_rows import OutputRows


class FusedTerm:
    """The only term on the student's logits, computed from the head's input in chunks where that is possible.

    It is `kl` with a teacher's sample or top-k, or `ce` with one label per position and a head wider than its input, as
    that of a language model is.

    Args:
        student: Its head must be a single linear layer whose output is returned unchanged as the logits.
        loss: Weights of the terms.
        output_rows: Defines a row.
    """

    def __init__(self, student: PreTrainedModel, loss: LossConfig, output_rows: OutputRows):
        self.student, self.output_rows = student, output_rows
        self.has_plain_head: bool | None = None  # unknown before the first eligible step
        names = [name for name in ("kl", "ce") if loss.computes(name)]
        is_fusable = type(output_rows) is OutputRows and (names == ["ce"] or loss.divergence in SPARSE_DIVERGENCES)
        self.name = names[0] if is_fusable and len(names) == 1 else ""

    def can_fuse(self, batch: Mapping[str, Tensor], signals: TeacherSignals) -> bool:
        """Returns whether a single-process step can be fused.

        The first eligible step runs the student on one row in eval mode to check that its logits are the head's output.
        """
        head = find_linear_head(self.student) if self._is_eligible(batch, signals) else None
        # float16: gradients are computed before the loss is scaled, and small ones would underflow to 0.
        if head is None or matmul_dtype(head.weight) == torch.float16:
            return False
        if self.name == "ce" and head.out_features <= head.in_features:
            return False
        if self.has_plain_head is None:
            self.has_plain_head = returns_head_output(self.student, batch)
        return self.has_plain_head

    def _is_eligible(self, batch: Mapping[str, Tensor], signals: TeacherSignals) -> bool:
        if "row_weights" in batch:  # of gradients, which the fused loss computes without them
            return False
        if self.name == "kl":
            return "ids" in signals and "logits" not in signals
        return self.name == "ce" and batch["labels"].dim() > 1 and not batch["labels"].is_floating_point()

    @contextmanager
    def capture(self, batch: Mapping[str, Tensor], signals: TeacherSignals) -> Iterator[list[Tensor] | None]:
        """Yields the list of `capture_head_inputs`, or None in a step that computes logits."""
        head = find_linear_head(self.student)
        if head is None or not self.can_fuse(batch, signals):
            yield None
            return
        with capture_head_inputs(head, batch) as inputs:
            yield inputs

    def compute(self, inputs: Tensor, batch: Batch, signals: TeacherSignals, temperature: float) -> dict[str, Tensor]:
        """Returns the term under its name.

        Args:
            inputs: The head's inputs [rows, width].
            batch: Contains the labels.
            signals: The teacher's sample or top-k as rows.
            temperature: Softens both distributions.

        Raises:
            InputError: As in `distribution_loss`.
            ValueError: The student's head is not a plain linear layer.
        """
        head = find_linear_head(self.student)
        if head is None:
            raise ValueError(f"loss.{self.name}: expected a head that is a plain linear layer, found another")
        if self.name == "ce":
            return {"ce": fused_label_loss(inputs, head, self.output_rows.labels(batch))}
        return {"kl": fused_distribution_loss(inputs, head, signals, temperature)}


def find_linear_head(model: nn.Module) -> nn.Linear | None:
    """Returns the head if it is a plain linear layer that is neither quantized, sharded nor hooked, otherwise None."""
    head = find_head(model)
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or hasattr(head.weight, "ds_id"):
        return None
    return None if head._forward_hooks or head._forward_pre_hooks else head


@contextmanager
def capture_head_inputs(head: nn.Linear, batch: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Makes the head skip all positions within the context and yields a list that collects its inputs.

    After a forward pass the list contains the head's inputs at the batch's requested positions [rows, width], in the
    order of `flatten_rows`.
    """
    mask = loss_mask(batch)
    captured: list[Tensor] = []

    def skip_positions(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        captured.append(inputs[0][mask])
        return (captured[-1][:0],)

    hook = head.register_forward_pre_hook(skip_positions)
    try:
        yield captured
    finally:
        hook.remove()


@torch.no_grad()
def returns_head_output(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
    """Returns whether the model's logits are its head's output itself; some families scale or soft-cap it."""
    head = find_linear_head(model)
    if head is None:
        return False
    row = {name: batch[name][:1] for name in OUTPUT_FIELDS if name in batch}
    outputs: list[tuple[Tensor, int]] = []
    with eval_mode(model), capture_head_inputs(head, row):
        hook = head.register_forward_hook(lambda _, inputs, output: outputs.append((output, output._version)))
        try:
            logits = find_logits(model(**build_inputs(model, row)))
        finally:
            hook.remove()
    return len(outputs) == 1 and logits is outputs[0][0] and logits._version == outputs[0][1]
