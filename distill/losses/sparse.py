"""Objectives on teacher distributions with only a few ids stored per position; no dense target is ever built."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from distill.losses.logits import upcast


def sampled_cross_entropy(
    student: Float[Tensor, "positions vocabulary"],
    ids: Int[Tensor, "positions k"],
    weights: Float[Tensor, "positions k"],
) -> Float[Tensor, ""]:
    """Soft cross-entropy with ids drawn from the teacher: mean over positions of Σᵢ wᵢ (log Σ exp z - z[idᵢ]), in nats.

    Ids of weight 0 are padding. With unbiased weights, the expected gradient is that of the dense soft cross-entropy,
    which is also KL's; KL itself is lower by the teacher's entropy, which a sample doesn't determine. 0 without
    positions.

    Args:
        student: Logits z.
        ids: Columns of `student`; an id may be repeated.
        weights: Share of the draws; rows need not sum to exactly 1. No gradient flows into them.

    Raises:
        RuntimeError: An id is outside the vocabulary.

    Source: Anshumann et al. 2025, sparse logit sampling (arXiv 2503.16870); drawn at temperature 1.
    """
    logits = upcast(student)
    loss: Tensor = _SampledCrossEntropy.apply(logits, ids.long(), weights.to(logits.dtype))
    return loss


class _SampledCrossEntropy(torch.autograd.Function):
    """Log-softmax forward, one exp backward; autograd would also build a dense tensor of zeros for the gather."""

    @staticmethod
    def forward(ctx: BackwardCFunction, student: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        log_q = F.log_softmax(student, dim=-1)
        ctx.save_for_backward(log_q, ids, weights)
        # A student's logit may be -inf, and padding refers to id 0: 0 · inf would be NaN.
        chosen = log_q.gather(1, ids).masked_fill_(weights == 0, 0)
        return -(weights * chosen).sum() / max(1, len(student))

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, upstream: Tensor) -> tuple[Tensor, None, None]:
        # Not modified: compute_gradient_shares runs backward before the step does.
        log_q, ids, weights = tuple(ctx.saved_tensors)
        scaled = weights * (upstream / max(1, len(weights)))
        grad = log_q.exp().mul_(scaled.sum(1, keepdim=True))
        return grad.scatter_add_(1, ids, -scaled), None, None


def topk_kl(
    student: Float[Tensor, "positions vocabulary"],
    ids: Int[Tensor, "positions k"],
    log_probs: Float[Tensor, "positions k"],
    tail: Float[Tensor, "positions"],
) -> Float[Tensor, ""]:
    """Mean over positions of KL(p ‖ q) in nats, with all ids but the k stored ones merged into one bucket.

    Σᵢ pᵢ (log pᵢ - log qᵢ) + tail (log tail - log q_tail), with p = exp(log_probs) and q = softmax(student). It is at
    most the dense KL, and equal to it when k is the whole vocabulary; the student's distribution within the tail has no
    effect. 0 without positions.

    log q_tail is computed over the other ids themselves, with the stored ones masked out, not as log(1 - Σᵢ qᵢ): for a
    confident student the difference from 1 is lost in float32. A tail of 0 contributes nothing; neither does any tail
    if every id is stored, because it is then a rounding residue.

    Args:
        student: Logits.
        ids: Columns of `student`, without repetitions in a row; entries of log-probability -inf are padding.
        log_probs: The teacher's log-probabilities of `ids`, in nats.
        tail: The teacher's total probability of all other ids.

    Raises:
        RuntimeError: An id is outside the vocabulary.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2, on k + 1 buckets; at temperature 1.
    """
    logits = upcast(student)
    stored = log_probs > -torch.inf
    remaining = tail.masked_fill(stored.sum(-1) == student.shape[1], 0)
    p = torch.cat([log_probs.exp(), remaining[:, None]], -1).to(logits.dtype)
    log_q = F.log_softmax(_Buckets.apply(logits, ids.long(), stored), dim=-1).masked_fill(p == 0, 0)
    return F.kl_div(log_q, p, reduction="sum") / max(1, len(student))


class _Buckets(torch.autograd.Function):
    """Logits [positions, k + 1] of the stored ids and, last, of all others together.

    Plain operations take four times as long over 32,768 ids, mostly for dense gradients that are mainly 0.
    """

    @staticmethod
    def forward(ctx: BackwardCFunction, logits: Tensor, ids: Tensor, stored: Tensor) -> Tensor:
        lowest = torch.finfo(logits.dtype).min  # not -inf: if no id is left, the log-softmax would be NaN
        # Padding refers to id 0, which is not masked by it: the minimum of its logit and +inf is its logit.
        sources = torch.full_like(ids, torch.inf, dtype=logits.dtype).masked_fill_(stored, lowest)
        others = logits.scatter_reduce(1, ids, sources, "amin")
        log_r = F.log_softmax(others, dim=-1)
        ctx.save_for_backward(log_r, ids, stored)
        # log Σ exp z = z - log softmax(z) for any z: the largest loses least precision
        total = others.amax(-1, keepdim=True) - log_r.amax(-1, keepdim=True)
        return torch.cat([logits.gather(1, ids).masked_fill_(~stored, lowest), total], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, upstream: Tensor) -> tuple[Tensor, None, None]:
        log_r, ids, stored = tuple(ctx.saved_tensors)
        grad = log_r.exp().mul_(upstream[:, -1:])
        return grad.scatter_add_(1, ids, upstream[:, :-1].masked_fill(~stored, 0)), None, None
