"""Comparison of next-text distributions between models with different tokenizers.

Where both models have processed the same text, a span is the shortest piece of text after it that both encode in whole
tokens. All functions take log-probabilities, for some spans at a time.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from distill.losses.logits import kl, mixed


class Outcomes(NamedTuple):
    """Log-probabilities of the possible continuations of a text: the span itself, or a token of the vocabulary.

    Args:
        tokens: Tokens that don't begin the span, and the span's first token without the rest of the span [spans,
            vocab].
        span: The whole span, in the tokenization of the text [spans].
        alone: The token that is the whole span, -1 if it takes several [spans].
    """

    tokens: Tensor
    span: Tensor
    alone: Tensor


class Vocabularies(NamedTuple):
    """Columns of the student and the teacher that are the same outcome, and columns without a partner.

    Args:
        shared: Pairs of columns [shared, 2].
        student_rest, teacher_rest: Columns in no pair.
        to_student, to_teacher: Partner of each column, -1 if it has none [vocabulary of the teacher, of the student].
    """

    shared: Tensor
    student_rest: Tensor
    teacher_rest: Tensor
    to_student: Tensor
    to_teacher: Tensor

    @classmethod
    def of(cls, shared: Int[Tensor, "shared 2"], student_size: int, teacher_size: int) -> "Vocabularies":
        to_teacher, to_student = (shared.new_full((size,), -1) for size in (student_size, teacher_size))
        to_teacher[shared[:, 0]], to_student[shared[:, 1]] = shared[:, 1], shared[:, 0]
        student_rest, teacher_rest = ((table < 0).nonzero()[:, 0] for table in (to_teacher, to_student))
        return cls(shared, student_rest, teacher_rest, to_student, to_teacher)


def merged(
    log_p: Float[Tensor, "tokens vocabulary"], ids: Int[Tensor, "tokens"], sizes: Int[Tensor, "spans"]
) -> Outcomes:
    """Merges the distributions of each span's tokens into one.

    The span has the product of its tokens' probabilities, p₁(t₁) c with c = p₂(t₂) … pₙ(tₙ); its first token without
    this continuation keeps p₁(t₁) (1 - c), and any other token its p₁, so that the probabilities sum to 1.

    Args:
        log_p: Distribution that each token was drawn from, with the spans' tokens concatenated.
        ids: The tokens.
        sizes: Number of tokens of each span, at least 1.

    Source: the product is that of GOLD (Patiño et al. 2025, "Unlocking On-Policy Distillation for Any Model Family",
    https://huggingface.co/spaces/HuggingFaceH4/on-policy-distillation, and TRL's GOLDTrainer). It multiplies all of p₁
    by c, although c doesn't apply to tokens that don't begin the span, and the result doesn't sum to 1. Treating the
    span as an outcome of its own, which both models have whatever their tokens, follows Minixhofer et al. 2025,
    approximate likelihood matching (arXiv 2503.20083).
    """
    first = sizes.cumsum(0) - sizes
    owner = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    said = log_p.gather(1, ids[:, None])[:, 0]
    later = said.index_fill(0, first, 0)
    continued = torch.zeros_like(said[first]).index_add(0, owner, later)
    # A confident model's c rounds to 1 and log(1 - c) to -inf, which would make any KL against it infinite.
    other = torch.log(-torch.expm1(continued.clamp(max=-torch.finfo(said.dtype).eps)))
    left = (said[first] + other).masked_fill(sizes == 1, -torch.inf)
    tokens = log_p[first].scatter(1, ids[first][:, None], left[:, None])
    return Outcomes(tokens, said[first] + continued, ids[first].masked_fill(sizes > 1, -1))


def with_partner(outcomes: Outcomes, partner: Int[Tensor, "spans"]) -> Outcomes:
    """Adds to the span the probability of a token that spells it, but isn't its tokenization in the text.

    Args:
        partner: Column of each span that spells what is one token for the other model; -1 for none.
    """
    column = partner.clamp(min=0)[:, None]
    mass = outcomes.tokens.gather(1, column)
    known = (partner >= 0)[:, None]
    span = torch.logaddexp(outcomes.span, mass.masked_fill(~known, -torch.inf)[:, 0])
    return Outcomes(outcomes.tokens.scatter(1, column, mass.masked_fill(known, -torch.inf)), span, outcomes.alone)


def paired(student: Outcomes, teacher: Outcomes, vocabularies: Vocabularies) -> tuple[Outcomes, Outcomes]:
    """Returns both models' outcomes with every token that spells the span counted as the span."""
    spelled_by = [
        torch.where(each.alone >= 0, table[each.alone.clamp(min=0)], -1)
        for each, table in ((teacher, vocabularies.to_student), (student, vocabularies.to_teacher))
    ]
    return with_partner(student, spelled_by[0]), with_partner(teacher, spelled_by[1])


def shared_divergence(
    student: Outcomes, teacher: Outcomes, vocabularies: Vocabularies, beta: float
) -> Float[Tensor, "spans"]:
    """Returns the divergence of each span over the shared tokens, the span itself, and all other tokens as one outcome.

    KL(p ‖ q) with beta 0, else β KL(p ‖ m) + (1 - β) KL(q ‖ m) with m = β p + (1 - β) q. Outcomes that are impossible
    for the student, such as other tokens if all of its own are shared, are removed from p, which is renormalized to 1.

    Source: GOLD (see `merged`), which compares the probabilities of the shared tokens without the others', so that they
    don't sum to 1 and a student equal to its teacher would have a gradient.
    """
    p = coarse(teacher, vocabularies.shared[:, 1], vocabularies.teacher_rest)
    q = coarse(student, vocabularies.shared[:, 0], vocabularies.student_rest)
    p = p.masked_fill(q == -torch.inf, -torch.inf).log_softmax(-1)
    if beta == 0:
        return kl(p, q)
    m = mixed(p, q, beta)
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def coarse(outcomes: Outcomes, shared: Tensor, rest: Tensor) -> Tensor:
    """Returns log-probabilities of the shared tokens, the span, and the rest together [spans, shared + 2]."""
    others = outcomes.tokens[:, rest]
    gone = (others == -torch.inf).all(-1)  # also if there are none; the gradient of logsumexp would be NaN
    total = others.masked_fill(gone[:, None], 0).logsumexp(-1).masked_fill(gone, -torch.inf)
    return torch.cat([outcomes.tokens[:, shared], outcomes.span[:, None], total[:, None]], -1)


def rest_distance(student: Outcomes, teacher: Outcomes, vocabularies: Vocabularies) -> Float[Tensor, "spans"]:
    """Returns `sorted_l1` of the probabilities of the tokens without a partner."""
    own, taught = student.tokens[:, vocabularies.student_rest], teacher.tokens[:, vocabularies.teacher_rest]
    return sorted_l1(own.exp(), taught.exp())


def sorted_l1(q: Float[Tensor, "rows _"], p: Float[Tensor, "rows _"]) -> Float[Tensor, "rows"]:
    """Returns Σ |p₍ᵢ₎ - q₍ᵢ₎| of the sorted probabilities, with the shorter row padded with zeros."""
    width = min(p.shape[1], q.shape[1])
    (left, p), (unmatched, q) = (rising(each).split([each.shape[1] - width, width], 1) for each in (p, q))
    return (p - q).abs().sum(-1) + left.sum(-1) + unmatched.sum(-1)


def rising(rows: Float[Tensor, "rows _"]) -> Float[Tensor, "rows _"]:
    """Returns each row in ascending order, differentiably."""
    if rows.device.type != "cpu":
        return rows.sort(-1).values
    # NumPy uses SIMD: for a row of 28,000 its sort is 30 times as fast as torch's, and its argsort 6 times.
    if not rows.requires_grad:
        return torch.from_numpy(np.sort(rows.numpy()))
    return rows.gather(-1, torch.from_numpy(np.argsort(rows.detach().numpy())))
