"""The head of a language model: the words that it has, and how it is kept from saying what nobody asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill.data.batches.share import spoken_of


def head_of(model: nn.Module) -> nn.Module | None:
    """What makes logits of words, None where logits are of anything else."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def words_of(student: nn.Module, signals: Mapping[str, Any]) -> dict[str, int]:
    """The `classes` of dense logits, where they are words: teacher and student have the same ones, and tables that may
    be padded to other numbers of rows.
    """
    return {"classes": signals["logits"].shape[-1]} if "logits" in signals and head_of(student) is not None else {}


@contextmanager
def asked_words(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it the model's logits are those of the batch's asked positions alone: [rows, vocabulary] in the order of
    `rows_of`. A head that is cut over processes, and a model without one, answer as ever.

    A masked language model is asked about one token in seven: the product with the vocabulary, most of a small
    student's work, and the memory of its logits shrink as much.
    """
    head = head_of(model)
    if not isinstance(head, nn.Linear) or isinstance(head.weight, DTensor) or hasattr(head.weight, "ds_id"):
        yield
        return
    mask = spoken_of(batch)
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][mask],) if given[0].dim() == 3 else None)
    try:
        yield
    finally:
        hook.remove()
