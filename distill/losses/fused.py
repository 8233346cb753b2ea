"""Sparse objectives from hidden states and the head's weight, which never build all logits [positions, vocabulary].

In the forward pass, the logits of some positions at a time are computed, turned into their gradient in the same memory,
and multiplied into the gradients of hidden states and weight. Values and gradients are those of `distill.losses.sparse`
on `hidden @ weight.T + bias`, up to the order of sums. Ids that pad a vocabulary are excluded by slicing the weight.

Source of gradients in the forward pass: Hsu et al. 2024, Liger Kernel (arXiv 2410.10989), section 3.2; targets of a few
ids are not in it.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from distill.losses.logits import upcast

CHUNK_BYTES = 64 << 20  # size of the logits that exist at once
GPU_CHUNK_BYTES = 256 << 20  # larger products keep a GPU busy


def fused_sampled_cross_entropy(
    hidden: Float[Tensor, "positions width"],
    weight: Float[Tensor, "vocabulary width"],
    ids: Int[Tensor, "positions k"],
    weights: Float[Tensor, "positions k"],
    *,
    bias: Float[Tensor, "vocabulary"] | None = None,
    chunk_bytes: int = 0,
) -> Float[Tensor, ""]:
    """`sampled_cross_entropy` of the head's logits; with one id of weight 1 per position, plain cross-entropy.

    Args:
        hidden: Input of the head.
        weight: Weight of the head; `weight[:classes]` excludes the padding of a vocabulary.
        ids: As in `sampled_cross_entropy`.
        weights: As in `sampled_cross_entropy`.
        bias: Bias of the head.
        chunk_bytes: Size of the logits that exist at once; 0 takes 64 MiB, on a GPU 256.

    Raises:
        RuntimeError: An id is outside the vocabulary.
    """
    ids, weights = ids.long(), upcast(weights)
    return _apply_in_chunks(hidden, weight, bias, chunk_bytes, lambda z, at: _sampled_(z, ids[at], weights[at]))


def fused_topk_kl(
    hidden: Float[Tensor, "positions width"],
    weight: Float[Tensor, "vocabulary width"],
    ids: Int[Tensor, "positions k"],
    log_probs: Float[Tensor, "positions k"],
    tail: Float[Tensor, "positions"],
    *,
    bias: Float[Tensor, "vocabulary"] | None = None,
    chunk_bytes: int = 0,
) -> Float[Tensor, ""]:
    """`topk_kl` of the head's logits.

    Args:
        hidden: Input of the head.
        weight: Weight of the head; `weight[:classes]` excludes the padding of a vocabulary.
        ids: As in `topk_kl`.
        log_probs: As in `topk_kl`.
        tail: As in `topk_kl`.
        bias: Bias of the head.
        chunk_bytes: Size of the logits that exist at once; 0 takes 64 MiB, on a GPU 256.

    Raises:
        RuntimeError: An id is outside the vocabulary.
    """
    ids, log_probs, tail = ids.long(), upcast(log_probs), upcast(tail)

    def chunk_loss(logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        return _topk_(logits, ids[at], log_probs[at], tail[at])

    return _apply_in_chunks(hidden, weight, bias, chunk_bytes, chunk_loss)


def _sampled_(logits: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows of the loss, and its gradient in the memory of the logits."""
    weights = weights.to(logits.dtype)
    # A student's logit may be -inf, and padding refers to id 0: 0 · inf would be NaN.
    chosen = logits.gather(1, ids).masked_fill_(weights == 0, 0)
    gradient, total = _softmax_(logits)
    share = weights.sum(1, keepdim=True)
    loss = (share * total).sum() - (weights * chosen).sum()
    return loss, gradient.mul_(share).scatter_add_(1, ids, -weights)


def _topk_(logits: Tensor, ids: Tensor, log_probs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum over rows of the loss, and its gradient in the memory of the logits."""
    stored = log_probs > -torch.inf
    p = log_probs.exp().to(logits.dtype)
    tail = tail.masked_fill(stored.sum(-1) == logits.shape[1], 0).to(logits.dtype)[:, None]
    lowest = torch.finfo(logits.dtype).min
    chosen = logits.gather(1, ids).masked_fill_(~stored, lowest)
    # Padding refers to id 0, which isn't masked by it: the minimum of its logit and +inf is its logit.
    sources = torch.full_like(chosen, torch.inf).masked_fill_(stored, lowest)
    gradient, others = _softmax_(logits.scatter_reduce_(1, ids, sources, "amin"))  # its maximum is not a stored id
    total = torch.logaddexp(chosen.logsumexp(-1, keepdim=True), others)
    mass = p.sum(-1, keepdim=True) + tail
    log_p = p.masked_fill(p == 0, 1).log()
    loss = (p * (log_p - chosen).masked_fill(p == 0, 0)).sum() + (mass * total).sum()
    loss = loss + (tail * (tail.masked_fill(tail == 0, 1).log() - others).masked_fill(tail == 0, 0)).sum()
    gradient.mul_(mass * (others - total).exp() - tail)
    return loss, gradient.scatter_add_(1, ids, (mass * (chosen - total).exp() - p).masked_fill(~stored, 0))


def _softmax_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the softmax in the memory of the logits, and log Σ exp [rows, 1]."""
    largest = logits.amax(-1, keepdim=True)
    powers = logits.sub_(largest).exp_()
    sums = powers.sum(-1, keepdim=True)
    return powers.div_(sums), largest + sums.log()


# (logits of some positions, the positions) -> (sum of the loss, gradient)
_ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


class _HeadContext(BackwardCFunction):
    """Context of `_FusedHeadLoss`; `needed` are the inputs among hidden, weight and bias that get a gradient."""

    needed: tuple[bool, bool, bool]


def _apply_in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_bytes: int, chunk_loss: _ChunkLoss
) -> Tensor:
    size = chunk_bytes or (CHUNK_BYTES if hidden.device.type == "cpu" else GPU_CHUNK_BYTES)
    loss: Tensor = _FusedHeadLoss.apply(hidden, weight, bias, size, chunk_loss)
    return loss


class _FusedHeadLoss(torch.autograd.Function):
    """Mean over positions of a loss of the head's logits, with all gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: _HeadContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_bytes: int,
        chunk_loss: _ChunkLoss,
    ) -> Tensor:
        dtype = matmul_dtype(hidden)
        inputs, head = hidden.to(dtype), weight.to(dtype)
        needed: tuple[bool, ...] = ctx.needs_input_grad
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        hidden_grad = torch.empty_like(hidden) if needed[0] else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if needed[1] else None
        bias_grad = torch.zeros_like(bias, dtype=exact) if bias is not None and needed[2] else None
        count, total = max(1, len(hidden)), torch.zeros((), dtype=exact, device=hidden.device)
        rows = max(1, chunk_bytes // (weight.shape[0] * exact.itemsize))
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            logits = (inputs[at] @ head.T).to(exact)
            loss, gradient = chunk_loss(logits if bias is None else logits.add_(bias), at)
            total += loss
            gradient = gradient.div_(count)
            if bias_grad is not None:
                bias_grad += gradient.sum(0)
            gradient = gradient.to(dtype)
            if hidden_grad is not None:
                hidden_grad[at] = gradient @ head
            if weight_grad is not None:
                add_product(weight_grad, gradient, inputs[at])
        pairs = ((hidden_grad, hidden), (weight_grad, weight), (bias_grad, bias))
        ctx.needed = (hidden_grad is not None, weight_grad is not None, bias_grad is not None)
        ctx.save_for_backward(*(g.to(x.dtype) for g, x in pairs if g is not None and x is not None))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: _HeadContext, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Not modified: a second backward pass reads the saved tensors again.
        scaled = (each if upstream == 1 else each * upstream for each in ctx.saved_tensors)
        return (*(next(scaled) if need else None for need in ctx.needed), None, None)


def add_product(sums: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Adds gradientᵀ · inputs to `sums` in place, in the precision of `sums`."""
    if gradient.dtype == sums.dtype:
        sums.addmm_(gradient.T, inputs)
    else:
        sums += gradient.T @ inputs


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which matrix products of `x` are computed here: autocast's if it is enabled."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
