"""The head of a language model, kept from saying what nobody asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill.data.share import spoken_of


@contextmanager
def asked_words(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it the model's logits are those of the batch's asked positions alone: [rows, vocabulary] in the order of
    `rows_of`. A head that is cut over processes, and a model without one, answer as ever.

    A masked language model is asked about one token in seven: the product with the vocabulary, most of a small
    student's work, and the memory of its logits shrink as much.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, nn.Linear) or isinstance(head.weight, DTensor) or hasattr(head.weight, "ds_id"):
        yield
        return
    mask = spoken_of(batch)
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][mask],) if given[0].dim() == 3 else None)
    try:
        yield
    finally:
        hook.remove()
