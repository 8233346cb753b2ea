"""The language-modelling head of a model and its restriction to the requested positions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill.data.batches.loss_mask import loss_mask
from distill.losses.teacher_signals import TeacherSignals


def find_head(model: nn.Module) -> nn.Module | None:
    """Returns the model's language-modelling head, or None if its logits are not over a vocabulary."""
    find: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def count_vocabulary_classes(student: nn.Module, signals: TeacherSignals) -> TeacherSignals:
    """Returns the number of `classes` of dense vocabulary logits; empty for other signals and students.

    Teacher and student share the tokens, but their tables may be padded to different numbers of rows.
    """
    is_vocabulary = "logits" in signals and find_head(student) is not None
    return TeacherSignals(classes=signals["logits"].shape[-1]) if is_vocabulary else TeacherSignals()


@contextmanager
def restrict_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Restricts the model's logits within the context to the batch's requested positions.

    They are then [rows, vocabulary], in the order of `flatten_rows`. A head sharded across processes, and a model
    without a head, are unaffected. Masked language modelling requests one token in seven; the product with the
    vocabulary, which is most of a small student's work, and the memory of its logits shrink by that factor.
    """
    head = find_head(model)
    if not isinstance(head, nn.Linear) or isinstance(head.weight, DTensor) or hasattr(head.weight, "ds_id"):
        yield
        return
    mask = loss_mask(batch)
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][mask],) if inputs[0].dim() == 3 else None)
    try:
        yield
    finally:
        hook.remove()
