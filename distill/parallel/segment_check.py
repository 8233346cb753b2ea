"""Check that a model computes the same for segments of rows as for whole rows."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from distill.checkpoint.outputs import read_logits
from distill.data.batches.encode import Batch
from distill.data.batches.segments import cut_segment
from distill.errors import InputError
from distill.eval_mode import eval_mode
from distill.models.inputs import build_inputs

_LENGTH = 11  # of the rows, which few numbers of segments divide


def check_segments(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Checks that a model computes the same logits for segments as for whole rows; every process of `group` calls it.

    Args:
        model: Its attention exchanges heads for positions among the processes, see `ulysses_attention`.
        group: The processes that have the segments, in their order.

    Raises:
        InputError: The logits of any segment differ, as where positions meet elsewhere than in attention.
    """
    with eval_mode(model):
        difference, size = _compare_segment(model, dist.get_rank(group), group.size())
    dist.all_reduce(difference, dist.ReduceOp.MAX, group)
    if not difference < size**0.5:
        raise InputError(
            f"layout cp={group.size()}: {type(model).__name__}: expected the logits of whole rows, found some that "
            f"differ by {float(difference):.2g} of the largest in a segment: positions meet elsewhere than in "
            "attention; use fsdp=N"
        )


@torch.no_grad()
def _compare_segment(model: PreTrainedModel, segment: int, segments: int) -> tuple[Tensor, float]:
    """Returns the largest difference of this process's logits, of the largest logit, and the size of a rounding."""
    whole = _draw_batch(model)
    part = cut_segment(whole, segment, segments)
    logits, exchange = read_logits(model(**build_inputs(model, part))), model.config._attn_implementation
    assert exchange is not None
    model.set_attn_implementation("sdpa")
    try:
        expected = read_logits(model(**build_inputs(model, whole))).float()
    finally:
        model.set_attn_implementation(exchange)
    size, largest = logits.shape[1], expected.abs().max()
    reference = pad(expected, (0, 0, 0, segments * size - _LENGTH))[:, segment * size : (segment + 1) * size]
    differences = (logits.float() - reference).abs().amax(-1) * part["attention_mask"]
    return differences.amax() / largest, torch.finfo(logits.dtype).eps


def _draw_batch(model: PreTrainedModel) -> Batch:
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(2 * _LENGTH, device=model.device) * 7 % (vocab_size - 1) + 1
    mask = torch.ones_like(ids).view(2, _LENGTH)
    mask[1, -3:] = 0
    return {"input_ids": ids.view(mask.shape), "attention_mask": mask, "labels": ids.view(mask.shape)}
