"""Truncated backpropagation through long documents: chunks of consecutive tokens, a backward pass for each.

Later chunks read the keys and values of the earlier ones without a gradient to them, so that memory follows the chunk.

Source: Dai et al. 2019, Transformer-XL (arXiv 1901.02860), section 3.2, with all earlier keys and values of the row
instead of a fixed number of hidden states, and one optimizer step for all chunks.
"""

from collections.abc import Callable, Iterator
from typing import cast

from torch import Tensor

from distill.data.batches.chunks import cut_chunks
from distill.data.batches.encode import Batch
from distill.models.context import Context


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
