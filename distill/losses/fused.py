"""Sparse objectives from hidden states and the head's weight, which never build all logits [positions, vocabulary].

In the forward pass, the logits of some positions at a time are computed, turned into their gradient in the same memory,
and multiplied into the gradients of hidden states and weight. Values and gradients are those of `distill.losses.sparse`
on `hidden @ weight.T + bias`, up to the order of sums. Ids that pad a vocabulary are excluded by slicing the weight.

Source of gradients in the forward pass: Hsu et al. 2024, Liger Kernel (arXiv 2410.10989), section 3.2; targets of a few
ids are not in it.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.losses.logits import widened

BYTES = 64 << 20  # of the logits that exist at once


def fused_sampled_cross_entropy(
    hidden: Float[Tensor, "positions width"],
    weight: Float[Tensor, "vocabulary width"],
    ids: Int[Tensor, "positions k"],
    weights: Float[Tensor, "positions k"],
    *,
    bias: Float[Tensor, "vocabulary"] | None = None,
    chunk_bytes: int = BYTES,
) -> Float[Tensor, ""]:
    """`sampled_cross_entropy` of the head's logits; with one id of weight 1 per position, plain cross-entropy.

    Args:
        hidden: Input of the head.
        weight, bias: Parameters of the head; `weight[:classes]` excludes the padding of a vocabulary.
        ids, weights: As in `sampled_cross_entropy`.
        chunk_bytes: Size of the logits that exist at once.

    Raises:
        RuntimeError: An id is outside the vocabulary.
    """
    ids, weights = ids.long(), widened(weights)
    return Fused.apply(hidden, weight, bias, chunk_bytes, lambda z, at: sampled_(z, ids[at], weights[at]))


def fused_topk_kl(
    hidden: Float[Tensor, "positions width"],
    weight: Float[Tensor, "vocabulary width"],
    ids: Int[Tensor, "positions k"],
    log_probs: Float[Tensor, "positions k"],
    tail: Float[Tensor, "positions"],
    *,
    bias: Float[Tensor, "vocabulary"] | None = None,
    chunk_bytes: int = BYTES,
) -> Float[Tensor, ""]:
    """`topk_kl` of the head's logits.

    Args:
        hidden: Input of the head.
        weight, bias: Parameters of the head; `weight[:classes]` excludes the padding of a vocabulary.
        ids, log_probs, tail: As in `topk_kl`.
        chunk_bytes: Size of the logits that exist at once.

    Raises:
        RuntimeError: An id is outside the vocabulary.
    """
    ids, log_probs, tail = ids.long(), widened(log_probs), widened(tail)
    return Fused.apply(hidden, weight, bias, chunk_bytes, lambda z, at: topk_(z, ids[at], log_probs[at], tail[at]))


def sampled_(logits: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows of the loss, and its gradient in the memory of the logits."""
    weights = weights.to(logits.dtype)
    counts = weights != 0  # a student's logit may be -inf, and padding refers to id 0
    chosen = logits.gather(1, ids).masked_fill_(~counts, 0)
    gradient, total = softmax_(logits)
    share = weights.sum(1, keepdim=True)
    loss = (share * total).sum() - (weights * chosen).sum()
    return loss, gradient.mul_(share).scatter_add_(1, ids, -weights)


def topk_(logits: Tensor, ids: Tensor, log_probs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows of the loss, and its gradient in the memory of the logits."""
    kept = log_probs > -torch.inf
    p = log_probs.exp().to(logits.dtype)
    tail = tail.masked_fill(kept.sum(-1) == logits.shape[1], 0).to(logits.dtype)[:, None]
    lowest = torch.finfo(logits.dtype).min
    chosen = logits.gather(1, ids).masked_fill_(~kept, lowest)
    # Padding refers to id 0, which isn't masked by it: the minimum of its logit and +inf is its logit.
    taken = torch.full_like(chosen, torch.inf).masked_fill_(kept, lowest)
    gradient, others = softmax_(logits.scatter_reduce_(1, ids, taken, "amin"))  # its maximum is not a stored id
    total = torch.logaddexp(chosen.logsumexp(-1, keepdim=True), others)
    mass = p.sum(-1, keepdim=True) + tail
    own = p.masked_fill(p == 0, 1).log()
    loss = (p * (own - chosen).masked_fill(p == 0, 0)).sum() + (mass * total).sum()
    loss = loss + (tail * (tail.masked_fill(tail == 0, 1).log() - others).masked_fill(tail == 0, 0)).sum()
    gradient.mul_(mass * (others - total).exp() - tail)
    return loss, gradient.scatter_add_(1, ids, (mass * (chosen - total).exp() - p).masked_fill(~kept, 0))


def softmax_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the softmax in the memory of the logits, and log Σ exp [rows, 1]."""
    most = logits.amax(-1, keepdim=True)
    powers = logits.sub_(most).exp_()
    sums = powers.sum(-1, keepdim=True)
    return powers.div_(sums), most + sums.log()


Part = Callable[[Tensor, slice], tuple[Tensor, Tensor]]  # logits of some positions -> (sum of the loss, gradient)


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_bytes: int, part: Part) -> Tensor:
        kind = products_dtype(hidden)
        read, head = hidden.to(kind), weight.to(kind)
        wanted = ctx.needs_input_grad
        exact = torch.float64 if kind == torch.float64 else torch.float32
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and wanted[2] else None
        count, total = max(1, len(hidden)), torch.zeros((), dtype=exact, device=hidden.device)
        rows = max(1, chunk_bytes // (weight.shape[0] * exact.itemsize))
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            logits = (read[at] @ head.T).to(exact)
            loss, gradient = part(logits if bias is None else logits.add_(bias), at)
            total += loss
            gradient = gradient.div_(count)
            if of_bias is not None:
                of_bias += gradient.sum(0)
            gradient = gradient.to(kind)
            if of_hidden is not None:
                of_hidden[at] = gradient @ head
            if of_weight is not None:
                add_product(of_weight, gradient, read[at])
        ctx.save_for_backward(
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Not modified: a second backward pass reads the saved tensors again.
        found = (each if each is None or upstream == 1 else each * upstream for each in ctx.saved_tensors)
        return (*found, None, None)


def add_product(sums: Tensor, gradient: Tensor, read: Tensor) -> None:
    """Computes sums += gradientᵀ · read, in the precision of the sums."""
    if gradient.dtype == sums.dtype:
        sums.addmm_(gradient.T, read)
    else:
        sums += gradient.T @ read


def products_dtype(x: Tensor) -> torch.dtype:
    """Returns the type in which products of `x` are computed here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
