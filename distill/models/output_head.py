"""The language-modelling head of a model and its restriction to the requested positions."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill.data.batches.share import loss_mask


def head_of(model: nn.Module) -> nn.Module | None:
    """Returns the model's language-modelling head, or None if its logits are not over a vocabulary."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def vocabulary_classes(student: nn.Module, signals: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of `classes` of dense vocabulary logits, otherwise an empty dict.

    Teacher and student share the tokens, but their tables may be padded to different numbers of rows.
    """
    return {"classes": signals["logits"].shape[-1]} if "logits" in signals and head_of(student) is not None else {}


@contextmanager
def restrict_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Restricts the model's logits within the context to the batch's requested positions: [rows, vocabulary] in the
    order of `rows_of`. A head sharded across processes, and a model without a head, are unaffected.

    Masked language modelling requests one token in seven; the product with the vocabulary, which is most of a small
    student's work, and the memory of its logits shrink by that factor.
    """
    head = head_of(model)
    if not isinstance(head, nn.Linear) or isinstance(head.weight, DTensor) or hasattr(head.weight, "ds_id"):
        yield
        return
    mask = loss_mask(batch)
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][mask],) if given[0].dim() == 3 else None)
    try:
        yield
    finally:
        hook.remove()
