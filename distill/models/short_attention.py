"""Attention to short texts in bfloat16 on the CPU, faster than torch's fused kernel.

The fused backward pass is slow there: 32 texts of 20 tokens, 12 heads of width 16, take 18 ms on one core of an
EPYC with AVX-512 and bf16, where both passes of products and a softmax take 3 (torch 2.13, 2026-11).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MOST_TOKENS = 128  # at 256 the fused kernel is as fast or faster, and needs no memory for all pairs of tokens
_NAME = "sdpa"
_BLOCK = 32  # numbers that a softmax of bfloat16 takes at a time; the rest of a row one by one, slower than in float32


@contextmanager
def attend_to_short_texts() -> Iterator[None]:
    """Within the context, models whose attention is `sdpa` compute it by `attend_by_products` where that is faster.

    That is in bfloat16 on the CPU for at most 128 tokens. The results are equal up to rounding.
    """
    before = ALL_ATTENTION_FUNCTIONS[_NAME]
    AttentionInterface.register(_NAME, attend)
    try:
        yield
    finally:
        AttentionInterface.register(_NAME, before)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Computes attention as transformers' `sdpa` does, from and to the same shapes, by products if they are faster."""
    is_short = key.shape[2] == query.shape[2] <= MOST_TOKENS
    is_plain = all(settings.get(name) is None for name in ("position_bias", "softcap", "cache", "s_aux"))
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else value.dtype
    if not (is_short and is_plain and dtype == torch.bfloat16 and value.device.type == "cpu"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    causal = settings.get("is_causal")
    if attention_mask is None and (getattr(module, "is_causal", True) if causal is None else causal):
        attention_mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    groups = getattr(module, "num_key_value_groups", 1)
    scale, dropout = settings.get("scaling") or query.shape[-1] ** -0.5, settings.get("dropout", 0.0)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    output = attend_by_products(query, key, value, attention_mask, scale, dropout)
    return output.transpose(1, 2).contiguous(), None


def attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0
) -> Tensor:
    """Returns the attention of each query to all keys, [rows, heads, queries, width].

    Args:
        query: [rows, heads, queries, width].
        key: [rows, heads, keys, width].
        value: [rows, heads, keys, width].
        mask: Boolean, true for the keys that a query attends to, or added to the scores; broadcast to [rows, heads,
            queries, keys]. A query without any key attends to all.
        scale: Factor of the products.
        dropout: Rate.
    """
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, torch.finfo(scores.dtype).min)
        scores = scores + mask
    is_ragged = scores.shape[-1] < 2 * _BLOCK and scores.shape[-1] % _BLOCK > 0
    shares = functional.softmax(scores, dim=-1, dtype=torch.float32 if is_ragged else None).to(scores.dtype)
    return torch.matmul(functional.dropout(shares, dropout) if dropout else shares, value)
