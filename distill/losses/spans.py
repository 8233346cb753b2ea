"""Comparison of next-text distributions between models with different tokenizers.

Where both models have processed the same text, a span is the shortest piece of text after it that both encode in whole
tokens. All functions take log-probabilities of some spans at a time.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from distill.losses.logits import log_mixture, row_kl


class Outcomes(NamedTuple):
    """Log-probabilities of the possible continuations of a text: the span itself, or a token of the vocabulary.

    Args:
        tokens: Tokens that don't begin the span, and the span's first token without the rest of the span [spans,
            vocab].
        span: The whole span, in the tokenization of the text [spans].
        single: The token that is the whole span, -1 if the span has several tokens [spans].
    """

    tokens: Tensor
    span: Tensor
    single: Tensor


class Vocabularies(NamedTuple):
    """Columns of the student and the teacher that are the same outcome, and columns without a partner.

    Args:
        shared: Pairs of columns [shared, 2].
        student_unshared, teacher_unshared: Columns in no pair.
        to_student, to_teacher: Partner of each column, -1 if it has none [vocabulary of the teacher, of the student].
    """

    shared: Tensor
    student_unshared: Tensor
    teacher_unshared: Tensor
    to_student: Tensor
    to_teacher: Tensor

    @classmethod
    def from_pairs(cls, shared: Int[Tensor, "shared 2"], student_size: int, teacher_size: int) -> "Vocabularies":
        """Builds the tables from pairs of columns and the sizes of the two vocabularies."""
        to_teacher, to_student = (shared.new_full((size,), -1) for size in (student_size, teacher_size))
        to_teacher[shared[:, 0]], to_student[shared[:, 1]] = shared[:, 1], shared[:, 0]
        student_unshared, teacher_unshared = ((table < 0).nonzero()[:, 0] for table in (to_teacher, to_student))
        return cls(shared, student_unshared, teacher_unshared, to_student, to_teacher)


def merge_spans(
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
    span = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    token_log_p = log_p.gather(1, ids[:, None])[:, 0]
    later = token_log_p.index_fill(0, first, 0)
    log_c = torch.zeros_like(token_log_p[first]).index_add(0, span, later)
    # A confident model's c rounds to 1 and log(1 - c) to -inf, which would make any KL against it infinite.
    log_other = torch.log(-torch.expm1(log_c.clamp(max=-torch.finfo(token_log_p.dtype).eps)))
    first_only = (token_log_p[first] + log_other).masked_fill(sizes == 1, -torch.inf)
    tokens = log_p[first].scatter(1, ids[first][:, None], first_only[:, None])
    return Outcomes(tokens, token_log_p[first] + log_c, ids[first].masked_fill(sizes > 1, -1))


def _add_partner(outcomes: Outcomes, partner: Int[Tensor, "spans"]) -> Outcomes:
    """Adds to the span the probability of a token that spells the span, but isn't its tokenization in the text.

    Args:
        outcomes: One model's outcomes.
        partner: Column of the token that spells the span, where the span is one token for the other model; else -1.
    """
    column = partner.clamp(min=0)[:, None]
    mass = outcomes.tokens.gather(1, column)
    exists = (partner >= 0)[:, None]
    span = torch.logaddexp(outcomes.span, mass.masked_fill(~exists, -torch.inf)[:, 0])
    return Outcomes(outcomes.tokens.scatter(1, column, mass.masked_fill(exists, -torch.inf)), span, outcomes.single)


def pair_outcomes(student: Outcomes, teacher: Outcomes, vocabularies: Vocabularies) -> tuple[Outcomes, Outcomes]:
    """Returns both models' outcomes with every token that spells the span counted as the span."""
    to_student, to_teacher = (
        torch.where(each.single >= 0, table[each.single.clamp(min=0)], -1)
        for each, table in ((teacher, vocabularies.to_student), (student, vocabularies.to_teacher))
    )
    return _add_partner(student, to_student), _add_partner(teacher, to_teacher)


def shared_divergence(
    student: Outcomes, teacher: Outcomes, vocabularies: Vocabularies, beta: float
) -> Float[Tensor, "spans"]:
    """Returns each span's divergence over the shared tokens, the span itself, and all other tokens as one outcome.

    KL(p ‖ q) with beta 0, else β KL(p ‖ m) + (1 - β) KL(q ‖ m) with m = β p + (1 - β) q. Outcomes that are impossible
    for the student, such as other tokens if all of its own are shared, are removed from p, which is renormalized to 1.

    Source: GOLD (see `merge_spans`), which compares the probabilities of the shared tokens without the others', so that
    they don't sum to 1 and a student equal to its teacher would have a gradient.
    """
    p = _merge_unshared(teacher, vocabularies.shared[:, 1], vocabularies.teacher_unshared)
    q = _merge_unshared(student, vocabularies.shared[:, 0], vocabularies.student_unshared)
    p = p.masked_fill(q == -torch.inf, -torch.inf).log_softmax(-1)
    if beta == 0:
        return row_kl(p, q)
    m = log_mixture(p, q, beta)
    return beta * row_kl(p, m) + (1 - beta) * row_kl(q, m)


def _merge_unshared(outcomes: Outcomes, shared: Tensor, unshared: Tensor) -> Tensor:
    """Returns log-probabilities of the shared tokens, the span, and all other tokens together [spans, shared + 2]."""
    others = outcomes.tokens[:, unshared]
    # Impossible also if there are none; the gradient of logsumexp would be NaN.
    impossible = (others == -torch.inf).all(-1)
    total = others.masked_fill(impossible[:, None], 0).logsumexp(-1).masked_fill(impossible, -torch.inf)
    return torch.cat([outcomes.tokens[:, shared], outcomes.span[:, None], total[:, None]], -1)


def unshared_distance(student: Outcomes, teacher: Outcomes, vocabularies: Vocabularies) -> Float[Tensor, "spans"]:
    """Returns `sorted_l1` of the probabilities of the tokens without a partner."""
    q, p = student.tokens[:, vocabularies.student_unshared], teacher.tokens[:, vocabularies.teacher_unshared]
    return sorted_l1(q.exp(), p.exp())


def sorted_l1(q: Float[Tensor, "rows _"], p: Float[Tensor, "rows _"]) -> Float[Tensor, "rows"]:
    """Returns Σ |p₍ᵢ₎ - q₍ᵢ₎| of the sorted probabilities, with the shorter row padded with zeros."""
    width = min(p.shape[1], q.shape[1])
    (rest_p, p), (rest_q, q) = (sort_ascending(rows).split([rows.shape[1] - width, width], 1) for rows in (p, q))
    distance: Tensor = (p - q).abs().sum(-1) + rest_p.sum(-1) + rest_q.sum(-1)
    return distance


def sort_ascending(rows: Float[Tensor, "rows _"]) -> Float[Tensor, "rows _"]:
    """Returns each row in ascending order, differentiably."""
    if rows.device.type != "cpu":
        ascending: Tensor = rows.sort(-1).values
        return ascending
    # NumPy uses SIMD: for a row of 28,000 its sort is 30 times as fast as torch's, and its argsort 6 times.
    if not rows.requires_grad:
        return torch.from_numpy(np.sort(rows.numpy()))
    return rows.gather(-1, torch.from_numpy(np.argsort(rows.detach().numpy())))
