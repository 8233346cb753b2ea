"""Truncated backpropagation through long documents: chunks of consecutive tokens, a backward pass for each.

Later chunks read the keys and values of the earlier ones without a gradient to them, so that memory follows the chunk.

Source: Dai et al. 2019, Transformer-XL (arXiv 1901.02860), section 3.2, with all earlier keys and values of the row
instead of a fixed number of hidden states, and one optimizer step for all chunks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.batches.chunks import cut_chunks
from distill.data.batches.encode import Batch
from distill.models.context import Context, check_context
from distill.train.steps.batch_entries import find_signals
from distill.train.steps.plain import run_student
from distill.train.steps.signals import SignalReader


@dataclass(frozen=True)
class BackwardWindow:
    """Divides batches into chunks with a backward pass each, for a student and its teacher.

    Args:
        tokens: Number of tokens of a chunk.
        student: The model that is trained.
        signals: As in `DistillationModule`; None also where no term needs the teacher.
    """

    tokens: int
    student: PreTrainedModel
    signals: SignalReader | None

    @property
    def continues_teacher(self) -> bool:
        """Whether the teacher reads each chunk after the ones before it; others are queried for the whole batch."""
        return bool(getattr(self.signals, "reads_context", False))

    def check_models(self) -> None:
        """Checks that the models can continue a text.

        Raises:
            InputError: As in `check_context`.
        """
        check_context(self.student)
        if self.continues_teacher:
            check_context(cast(Any, self.signals).model)

    def divide(self, batch: Batch, read_signals: Callable[[Batch], object]) -> Iterator[Batch]:
        """Yields the chunks of a padded batch, as `yield_windows` does.

        Args:
            batch: Padded batch with a label for each token, and signals if they aren't read in the step.
            read_signals: Returns the teacher's signals for a batch.
        """
        is_read_here = self.signals is not None and find_signals(batch) is None
        if is_read_here and not self.continues_teacher:
            batch = batch | {"signals": cast(Tensor, read_signals(batch))}

        def carry(part: Batch) -> None:
            with torch.no_grad():
                run_student(self.student, part)
                if is_read_here and self.continues_teacher:
                    read_signals(part)

        return yield_windows(batch, self.tokens, carry)


def yield_windows(batch: Batch, tokens: int, carry: Callable[[Batch], object]) -> Iterator[Batch]:
    """Yields the chunks of a padded batch; the next one may be requested after the backward pass of the last one.

    Each has a `context`, what models remember of the earlier tokens. A batch that fits into a chunk is yielded itself.

    Args:
        batch: Padded batch with a label for each token.
        tokens: Number of tokens of a chunk.
        carry: Called with a chunk without a loss; it has to run the forward passes of the models.

    Raises:
        InputError: As in `cut_chunks`.
    """
    if batch["attention_mask"].shape[1] <= tokens:
        yield batch
        return
    context = Context(batch["attention_mask"].shape[1])
    for chunk in cut_chunks(batch, tokens):
        context.select_rows(chunk.rows)
        part: Batch = chunk.batch | {"context": cast(Tensor, context)}
        if chunk.has_loss:
            yield part
        else:
            carry(part)
        context.advance(part["attention_mask"])
