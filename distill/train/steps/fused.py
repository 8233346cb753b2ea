"""Training on a sample or the top-k of the teacher's distribution without computing the student's full logits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distill.checkpoint.outputs import find_logits
from distill.data.batches.share import loss_mask
from distill.losses.compose import fused_distribution_loss
from distill.losses.config import OF_PART, LossConfig
from distill.losses.fused import products_dtype
from distill.models.inputs import model_inputs
from distill.models.output_head import head_of
from distill.tasks.logit_rows import OutputRows

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "documents", "positions")


class FusedKL:
    """The fused `kl` term of a teacher's sample or top-k, computed without the student's logits where possible.

    Args:
        student: Its head must be a single linear layer whose output is returned unchanged as the logits.
        loss: Weights of the terms; `kl` must be enabled and `ce` disabled.
        answers: Defines a row.
    """

    def __init__(self, student: nn.Module, loss: LossConfig, answers: OutputRows):
        self.student = student
        self.plain: bool | None = None
        self.reads_kl = loss.kl > 0 and not loss.ce and loss.divergence in OF_PART and type(answers) is OutputRows

    def fits(self, batch: Mapping[str, Tensor], signals: Mapping[str, Any]) -> bool:
        """Returns whether a single-process step can be fused; the first eligible step runs the student on one row in
        eval mode to check that its logits are the head's output.
        """
        head = linear_head(self.student) if self.reads_kl and "ids" in signals and "logits" not in signals else None
        # float16: gradients are computed before the loss is scaled, and small ones would underflow to 0.
        if head is None or products_dtype(head.weight) == torch.float16:
            return False
        if self.plain is None:
            self.plain = returns_head_output(self.student, batch)
        return self.plain

    @contextmanager
    def reading(self, batch: Mapping[str, Tensor], signals: Mapping[str, Any]) -> Iterator[list[Tensor] | None]:
        """Yields the list of `capture_head_inputs`, or None in a step that computes logits."""
        if not self.fits(batch, signals):
            yield None
            return
        with capture_head_inputs(self.student, batch) as read:
            yield read

    def kl(self, read: Tensor, said: Mapping[str, Any], temperature: float) -> Tensor:
        """Returns the `kl` term for the head's inputs `read` [rows, width]."""
        head = linear_head(self.student)
        assert head is not None
        return fused_distribution_loss(read, head, said, temperature)


def linear_head(model: nn.Module) -> nn.Linear | None:
    """Returns the head if it is a plain linear layer that is neither quantized, sharded nor hooked, otherwise None."""
    head = head_of(model)
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or hasattr(head.weight, "ds_id"):
        return None
    return None if head._forward_hooks or head._forward_pre_hooks else head


@contextmanager
def capture_head_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Makes the head skip all positions within the context and yields a list that collects its inputs.

    After a forward pass the list contains the head's inputs at the batch's requested positions [rows, width], in the
    order of `rows_of`.
    """
    head, mask = linear_head(model), loss_mask(batch)
    assert head is not None
    read: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        read.append(given[0][mask])
        return (read[-1][:0],)

    hook = head.register_forward_pre_hook(keep)
    try:
        yield read
    finally:
        hook.remove()


@torch.no_grad()
def returns_head_output(model: Any, batch: Mapping[str, Tensor]) -> bool:
    """Returns whether the model's logits are its head's output itself; some families scale or soft-cap it."""
    row = {name: batch[name][:1] for name in INPUTS if name in batch}
    said: list[tuple[Tensor, int]] = []
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # without dropout the random state of the training is unchanged
    head = linear_head(model)
    assert head is not None
    try:
        with capture_head_inputs(model, row):
            hook = head.register_forward_hook(lambda _, given, output: said.append((output, output._version)))
            try:
                logits = find_logits(model(**model_inputs(model, row)))
            finally:
                hook.remove()
    finally:
        for module, training in modes:
            module.training = training
    return len(said) == 1 and logits is said[0][0] and logits._version == said[0][1]
