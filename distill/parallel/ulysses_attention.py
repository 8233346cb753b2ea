"""Attention of models whose rows are divided among processes: heads are exchanged for positions and back.

Each process computes everything but attention for a segment of each row's positions. Before attention it sends the
queries, keys and values of each group of heads to the process that attends with these, and gets those of its own heads
for all positions; the results go back the same way. Activations and logits of a process shrink by the number of
processes N; what is sent in a layer is four tensors of a segment's size, whatever N is.

The other known way is ring attention, in which keys and values pass from process to process while queries stay. torch
2.13 has a prototype (torch.distributed.tensor.experimental.context_parallel) for the fused attention kernels of GPUs,
without masks: there is none for a CPU, on which layouts are tested, and none for padded rows of encoders, packed rows
and windows. The exchange uses any attention with any mask, and gives each process the same work where attention is
causal; in return N has to divide the numbers of heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509), section 3; through transformers' AttentionInterface,
so that the modelling code is the stock one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distill.errors import InputError
from distill.models.packed_inputs import HEAD_EXCHANGE

_HEADS, _POSITIONS = 1, 2  # dimensions of queries, keys and values; those of what attention returns are swapped
_BIASES = ("position_bias", "softcap", "s_aux", "head_mask")  # settings for each head, or that sdpa doesn't have


def exchange_heads(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Makes the attention of a model exchange heads for positions among the processes of `group`.

    From then on it takes batches of segments only (see `build_segment_inputs`), on all of these processes at a time.

    Raises:
        InputError: The model's attention isn't one that transformers can replace.
    """
    name = f"{HEAD_EXCHANGE}_{group.group_name}"
    AttentionInterface.register(name, partial(attend_with_exchange, group=group))
    AttentionMaskInterface.register(name, build_row_mask)
    if type(model)._can_set_attn_implementation():
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise InputError(
            f"layout cp: {type(model).__name__}: expected attention that transformers' AttentionInterface can replace, "
            "found the model's own: a segment would not see the others; use fsdp=N"
        )


def attend_with_exchange(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    group: dist.ProcessGroup,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Returns the attention of a segment's positions to all positions of their rows.

    Args:
        module: The attention module.
        query: [rows, heads, positions of the segment, width].
        key: [rows, key and value heads, positions of the segment, width].
        value: As `key`, of any width.
        attention_mask: Mask of whole rows [rows or 1, 1, all positions or 1, all positions], boolean or added; None
            for full attention, or for causal attention of a causal module.
        group: The processes that have the segments of the same rows, in their order.
        dropout: Rate; each process draws for its own heads.
        scaling: Factor of the scores.
        is_causal: Overrides the module's.
        settings: Further settings of the family; windows are in the mask.

    Returns:
        [rows, positions of the segment, heads, width of the values], and None in place of the weights.

    Raises:
        InputError: The heads can't be divided evenly, or the scores of the family have a bias.
    """
    biases = [name for name in _BIASES if settings.get(name) is not None]
    if biases:
        raise InputError(
            f"layout cp: {type(module).__name__}: expected attention without biases, found {', '.join(biases)}: a "
            "process would add those of other heads and positions; use fsdp=N"
        )
    for each, kind in ((query, "attention heads"), (key, "key and value heads")):
        if each.shape[_HEADS] % group.size():
            raise InputError(
                f"layout cp={group.size()}: {type(module).__name__}: expected a divisor of {each.shape[_HEADS]} "
                f"{kind}: they can't be divided evenly"
            )
    query, key, value = (exchange_parts(each, _HEADS, _POSITIONS, group) for each in (query, key, value))
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal
    )
    return exchange_parts(output, _HEADS, _POSITIONS, group), None  # [rows, positions, heads, width]


def exchange_parts(values: Tensor, split: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this process's part of all tensors along the dimension `split`, joined along `joined`; differentiable.

    Every process of the group calls it, with a tensor of the same shape, whose size along `split` the number of
    processes divides.
    """
    result: Tensor = _PartExchange.apply(values, split, joined, group)
    return result


class _PartExchange(torch.autograd.Function):
    """The exchange, whose gradient is the exchange back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, split: int, joined: int, group: dist.ProcessGroup) -> Tensor:
        """Returns the part of all tensors."""
        ctx.way, ctx.group = (split, joined), group
        return _exchange(values, split, joined, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the gradient of this process's tensor."""
        split, joined = ctx.way
        return _exchange(gradients[0], joined, split, ctx.group), None, None, None


def _exchange(values: Tensor, split: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    parts = torch.stack(values.chunk(group.size(), split))  # one for each process
    received = collectives.wait_tensor(collectives.all_to_all_single(parts, None, None, group))
    return torch.cat(received.unbind(), joined)


def build_row_mask(
    *,
    batch_size: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> Tensor | None:
    """Returns the attention mask of whole rows, which transformers requests for the lengths of a segment.

    Nothing attends to padding behind the tokens of a causal row, so that such rows need no mask [positions, positions].

    Args:
        batch_size: Number of rows.
        mask_function: Returns whether a query attends to a key, from their positions.
        attention_mask: Which positions of whole rows are tokens, bool [rows, all positions].
        local_size: Size of the window.
        allow_is_causal_skip: Whether None stands for causal attention.
        allow_is_bidirectional_skip: Whether None stands for full attention.
        use_vmap: Whether the mask function takes no tensors of positions.
        device: Device of the mask.
        settings: Lengths and offsets of the segment, which have no effect.

    Raises:
        ValueError: There is no mask of whole rows, so that their length is unknown.
    """
    if attention_mask is None:
        raise ValueError("attention_mask: expected that of whole rows, found none: inputs are those of a segment")
    length = attention_mask.shape[-1]
    is_full = local_size is None or length <= local_size
    if allow_is_bidirectional_skip and is_full:
        return None if attention_mask.all() else attention_mask[:, None, None, :]
    is_padded_behind = allow_is_causal_skip and bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())
    if is_padded_behind and is_full:
        return None
    return sdpa_mask(
        batch_size=1 if is_padded_behind else batch_size,
        q_length=length,
        kv_length=length,
        mask_function=mask_function,
        attention_mask=None if is_padded_behind else attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
