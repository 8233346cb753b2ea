"""Learning from a part of the teacher's distribution without the logits of the student's words."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distill.checkpoint.outputs import find_logits
from distill.data.batches.share import spoken_of
from distill.losses.compose import fused_distribution_loss
from distill.losses.config import OF_PART, LossConfig
from distill.losses.fused import products_dtype
from distill.models.inputs import model_inputs
from distill.models.output_head import head_of
from distill.tasks.logit_rows import Answers

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "documents", "positions")


class Headless:
    """Whether steps can do without the student's logits: for `kl` alone, of a teacher's sample or top-k.

    Args:
        student: Its head has to be one linear layer, whose output is what the student says.
        loss: Its terms.
        answers: What a row is.
    """

    def __init__(self, student: nn.Module, loss: LossConfig, answers: Answers):
        self.student = student
        self.plain: bool | None = None
        self.reads_kl = loss.kl > 0 and not loss.ce and loss.divergence in OF_PART and type(answers) is Answers

    def fits(self, batch: Mapping[str, Tensor], signals: Mapping[str, Any]) -> bool:
        """Of a step on one process; the first one that may asks the student about a row, in eval mode."""
        head = linear_head(self.student) if self.reads_kl and "ids" in signals and "logits" not in signals else None
        # float16: gradients are made before the loss is scaled, and small ones would be 0.
        if head is None or products_dtype(head.weight) == torch.float16:
            return False
        if self.plain is None:
            self.plain = says_what_its_head_says(self.student, batch)
        return self.plain

    @contextmanager
    def reading(self, batch: Mapping[str, Tensor], signals: Mapping[str, Any]) -> Iterator[list[Tensor] | None]:
        """See `reading_of_head`; None in a step that makes logits."""
        if not self.fits(batch, signals):
            yield None
            return
        with reading_of_head(self.student, batch) as read:
            yield read

    def kl(self, read: Tensor, said: Mapping[str, Any], temperature: float) -> Tensor:
        """The term, of what the head would have read [rows, width]."""
        head = linear_head(self.student)
        assert head is not None
        return fused_distribution_loss(read, head, said, temperature)


def linear_head(model: nn.Module) -> nn.Linear | None:
    """The head where it is a linear layer and nothing else: none that is quantized, cut, or watched."""
    head = head_of(model)
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or hasattr(head.weight, "ds_id"):
        return None
    return None if head._forward_hooks or head._forward_pre_hooks else head


@contextmanager
def reading_of_head(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Within it the head is asked about no position; after a forward pass what it would have read at the batch's asked
    ones [rows, width], in the order of `rows_of`, is in the list.
    """
    head, mask = linear_head(model), spoken_of(batch)
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
def says_what_its_head_says(model: Any, batch: Mapping[str, Tensor]) -> bool:
    """Whether logits are the head's output itself: some families scale or bend them afterwards."""
    row = {name: batch[name][:1] for name in INPUTS if name in batch}
    said: list[tuple[Tensor, int]] = []
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # without dropout the training's random numbers stay where they are
    head = linear_head(model)
    assert head is not None
    try:
        with reading_of_head(model, row):
            hook = head.register_forward_hook(lambda _, given, output: said.append((output, output._version)))
            try:
                logits = find_logits(model(**model_inputs(model, row)))
            finally:
                hook.remove()
    finally:
        for module, training in modes:
            module.training = training
    return len(said) == 1 and logits is said[0][0] and logits._version == said[0][1]
