"""A training step in micro-batches, in ever smaller ones where memory runs out."""

import gc
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from distill.data.batches.encode import Batch
from distill.data.batches.split import split_batch
from distill.errors import InputError

Terms = dict[str, Tensor]
Divide = Callable[[Batch], Iterable[Batch]]
# The last three are oneDNN's, which doesn't tell a lack of memory from other failures.
_CPU_MESSAGES = (
    "can't allocate memory", "not enough memory", "std::bad_alloc", "Cannot allocate memory",
    "could not create a primitive", "could not execute a primitive", "could not create a memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory ran out; torch raises a plain RuntimeError for a CPU's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES)


class MicroBatches:
    """Runs forward and backward passes of a batch in parts, and doubles their number when memory runs out.

    The gradients are those of the whole batch up to rounding: each part's loss has its share of the batch.

    Args:
        parts: Number of micro-batches of a batch at first.
    """

    def __init__(self, parts: int = 1):
        self.parts = parts

    def run(
        self,
        batch: Batch,
        compute: Callable[[Batch], tuple[Tensor, Terms]],
        backward: Callable[[Tensor], object],
        parameters: Iterable[nn.Parameter],
        report: Callable[[int], None],
        divide: Divide,
    ) -> tuple[Tensor, Terms]:
        """Returns the batch's loss and terms, without autograd graphs, with the gradients added to the parameters'.

        Args:
            batch: Padded batch with labels.
            compute: Returns the loss and the terms of a micro-batch.
            backward: Runs the backward pass of a micro-batch's loss.
            parameters: Parameters that are trained; gradients that they have, of earlier batches, are kept.
            report: Called with the new number of parts when memory has run out.
            divide: Yields smaller batches of a micro-batch, each after the backward pass of the one before.

        Raises:
            InputError: Not even a single row fits.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        earlier = [parameter.grad for parameter in trained]
        while True:
            for parameter in trained:
                parameter.grad = None
            result = self._try(batch, compute, backward, divide)
            if not isinstance(result, str):
                break
            gc.collect()  # tensors in cycles of the failed pass
            self._halve(batch, result)
            report(self.parts)
        for parameter, gradient in zip(trained, earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return result

    def _try(
        self,
        batch: Batch,
        compute: Callable[[Batch], tuple[Tensor, Terms]],
        backward: Callable[[Tensor], object],
        divide: Divide,
    ) -> tuple[Tensor, Terms] | str:
        """Returns the loss and the terms of a batch, or the message if memory ran out: the error refers to the pass."""
        total, terms = None, Terms()
        try:
            for part in chain.from_iterable(map(divide, split_batch(batch, self.parts))):
                loss, part_terms = compute(part)
                backward(loss)
                total = loss.detach() if total is None else total + loss.detach()
                terms = {name: value.detach() + terms.get(name, 0.0) for name, value in part_terms.items()}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        assert total is not None
        return total, terms

    def _halve(self, batch: Batch, message: str) -> None:
        rows = len(batch["attention_mask"])
        if self.parts >= rows:
            raise InputError(
                f"train: expected memory for one row of {batch['attention_mask'].shape[1]} tokens, found too little "
                f"even for that ({message}); use train.checkpointing full, a lower data.max_length or a smaller model"
            )
        self.parts *= 2
