"""Objectives between models with different tokenizers; p is the teacher's distribution, q the student's.

Logits are compared at spans, the shortest pieces of a text that both tokenizers encode in whole tokens. In the forward
pass, the distributions of some spans at a time are computed, turned into their gradient and released.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.errors import InputError
from distill.losses.across_config import AcrossConfig
from distill.losses.fused import BYTES
from distill.losses.logits import IGNORED, widened
from distill.losses.spans import Vocabularies, merged, paired, rest_distance, shared_divergence, sorted_l1

NEEDED = ("labels", "teacher_labels", "spans")


def sorted_distance(
    student: Float[Tensor, "rows vocabulary"],
    teacher: Float[Tensor, "rows teacher_vocabulary"],
    *,
    temperature: float = 1.0,
    chunk_bytes: int = BYTES,
) -> Float[Tensor, ""]:
    """T² · mean over rows of Σ |p₍ᵢ₎ - q₍ᵢ₎|, with probabilities in descending order and the shorter padded with zeros.

    From 0 to 2 T², independent of which token has which probability. 0 without rows.

    Args:
        student, teacher: Logits; a gradient flows into the student's only.
        temperature: Softens both.
        chunk_bytes: Size of the distributions that exist at once.

    Source: Boizard et al. 2024, universal logit distillation (arXiv 2402.12030), without its cross-entropy.
    """
    places = torch.arange(len(student), device=student.device)
    ones = torch.ones_like(places)
    sides = (Side(student, places, places, ones), Side(teacher, places, places, ones))
    return over_spans(*sides, sorted_tokens, temperature, chunk_bytes)


def across_loss(
    student_logits: Float[Tensor, "batch length vocabulary"],
    teacher_logits: Float[Tensor, "batch teacher_length teacher_vocabulary"],
    batch: Mapping[str, Tensor],
    config: AcrossConfig,
    shared: Int[Tensor, "shared 2"] | None = None,
    *,
    chunk_bytes: int = BYTES,
) -> Float[Tensor, ""]:
    """T² · mean, over a batch's spans with labels in both models, of the distance that `config` names; 0 without any.

    `sorted`: of the two distributions over a span's first token. `spans`: w D + (1 - w) R, with D the divergence on the
    shared tokens and the span as a whole (`shared_divergence`), R the sorted distance on the other tokens, and w the
    shared weight. With one vocabulary and spans of one token, D is the plain divergence and R is 0.

    Args:
        student_logits, teacher_logits: Padded; a gradient flows into the student's only.
        batch: From `AlignedRows` or `MaskedAlignedRows`. `labels` [batch, length] and `teacher_labels` [batch,
            teacher_length] are the tokens to predict at each position, IGNORED elsewhere: for causal models the next
            token. `spans` [batch, spans, 4] are the positions that predict a span, first and end of the student's and
            of the teacher's; equal ones are padding.
        config: Kind, weights, temperature.
        shared: Pairs of ids with the same text, from `shared_vocabulary`; for `spans`.
        chunk_bytes: Size of the distributions that exist at once.

    Raises:
        InputError: The batch is of another kind, the logits have other positions than the labels, or the shared
            vocabulary is missing or that of other models.

    Source: Boizard et al. 2024, universal logit distillation (arXiv 2402.12030), which compares the first position with
    the first and so on, where the models have mostly processed different texts; and GOLD, with the deviations described
    at `merged` and `shared_divergence`. For a masked model, a span's probability is the product of its tokens'
    probabilities, each with all of them masked, which assumes that they are independent.
    """
    check(student_logits, teacher_logits, batch, config, shared)
    keep = answered_spans(batch["spans"], batch["labels"], batch["teacher_labels"])
    spans = batch["spans"]
    sides = (
        side_of(student_logits, batch["labels"], spans[..., :2], keep),
        side_of(teacher_logits, batch["teacher_labels"], spans[..., 2:], keep),
    )
    if config.kind == "sorted":
        student, teacher = (first_tokens(each) for each in sides)
        return over_spans(student, teacher, sorted_tokens, config.temperature, chunk_bytes)
    assert shared is not None
    vocabularies = Vocabularies.of(
        shared.long().to(student_logits.device), student_logits.shape[-1], teacher_logits.shape[-1]
    )

    def distance(q: "Tokens", p: "Tokens") -> Tensor:
        own, taught = paired(merged(*q), merged(*p), vocabularies)
        total = torch.zeros_like(own.span)
        if config.shared_weight > 0:
            total = config.shared_weight * shared_divergence(own, taught, vocabularies, config.beta)
        if config.shared_weight < 1:
            total = total + (1 - config.shared_weight) * rest_distance(own, taught, vocabularies)
        return total

    return over_spans(*sides, distance, config.temperature, chunk_bytes)


def answered_spans(
    spans: Int[Tensor, "batch spans 4"],
    labels: Int[Tensor, "batch length"],
    teacher_labels: Int[Tensor, "batch teacher_length"],
) -> Bool[Tensor, "batch spans"]:
    """Returns the spans with a label for every token in both models: for masked models those masked on both sides.

    Padding is excluded.
    """
    kept = spans[..., 1] > spans[..., 0]
    for known, first, end in (
        (labels != IGNORED, spans[..., 0], spans[..., 1]),
        (teacher_labels != IGNORED, spans[..., 2], spans[..., 3]),
    ):
        before = F.pad(known.long().cumsum(1), (1, 0))
        kept = kept & (before.gather(1, end) - before.gather(1, first) == end - first)
    return kept


class Side(NamedTuple):
    """One model's logits at spans.

    Args:
        logits: Logits of every position [positions, vocabulary].
        places: The spans' positions, one span after the other [tokens].
        ids: The tokens to predict there [tokens].
        sizes: Number of tokens of each span [spans].
    """

    logits: Tensor
    places: Tensor
    ids: Tensor
    sizes: Tensor


class Tokens(NamedTuple):
    """Log-probabilities [tokens, vocabulary] at the positions that predict `ids`, the tokens of spans of `sizes`."""

    log_p: Tensor
    ids: Tensor
    sizes: Tensor


def side_of(logits: Tensor, labels: Tensor, ends: Tensor, keep: Tensor) -> Side:
    length = labels.shape[1]
    row = torch.arange(len(labels), device=labels.device)[:, None].expand_as(keep)[keep]
    first, end = ends[keep].unbind(-1)
    sizes = end - first
    starts = (row * length + first - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
    places = starts + torch.arange(len(starts), device=labels.device)
    return Side(logits.flatten(0, 1), places, labels.flatten()[places], sizes)


def first_tokens(side: Side) -> Side:
    """Returns the side with only the first token of each span."""
    first = side.sizes.cumsum(0) - side.sizes
    return Side(side.logits, side.places[first], side.ids[first], torch.ones_like(side.sizes))


def sorted_tokens(q: Tokens, p: Tokens) -> Tensor:
    return sorted_l1(q.log_p.exp(), p.log_p.exp())


Distance = Callable[[Tokens, Tokens], Tensor]  # (student's, teacher's tokens of some spans) -> [spans]


def over_spans(student: Side, teacher: Side, distance: Distance, temperature: float, chunk_bytes: int) -> Tensor:
    """Returns T² · mean over spans of a distance of the softened distributions, with a gradient for the student."""
    value = _OverSpans.apply(student.logits, student, teacher, distance, temperature, chunk_bytes)
    return value * temperature**2 / max(1, len(student.sizes))


class _OverSpans(torch.autograd.Function):
    """Sum over spans. No position belongs to two of them, so that each gets its gradient from one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        student: Side,
        teacher: Side,
        distance: Distance,
        temperature: float,
        chunk_bytes: int,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(logits) if wanted else None
        total = torch.zeros((), dtype=widened(logits[:0]).dtype, device=logits.device)
        counts = chunks(student, teacher, chunk_bytes)
        for own, taught in zip(split_spans(student, counts), split_spans(teacher, counts), strict=True):
            with torch.enable_grad():
                read = widened(logits.detach()[own.places]).requires_grad_(wanted)
                heard = widened(teacher.logits[taught.places].detach())
                q = Tokens((read / temperature).log_softmax(-1), own.ids, own.sizes)
                p = Tokens((heard / temperature).log_softmax(-1), taught.ids, taught.sizes)
                value = distance(q, p).sum()
            total += value.detach()
            if gradient is not None:
                gradient[own.places] = torch.autograd.grad(value, read)[0].to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # not modified: gradient_shares runs backward before the step does
        return None if gradient is None else gradient * upstream, *[None] * 5


def chunks(student: Side, teacher: Side, chunk_bytes: int) -> list[int]:
    """Returns the numbers of spans at a time whose distributions fit into `chunk_bytes`, give or take a span."""
    widths = [each.logits.shape[1] * widened(each.logits[:0]).element_size() for each in (student, teacher)]
    cost = student.sizes * widths[0] + teacher.sizes * widths[1]
    number = cost.cumsum(0) // max(1, chunk_bytes)
    return torch.unique_consecutive(number, return_counts=True)[1].tolist()


def split_spans(side: Side, counts: list[int]) -> list[Side]:
    sizes = side.sizes.split(counts)
    tokens = [int(each.sum()) for each in sizes]
    parts = zip(side.places.split(tokens), side.ids.split(tokens), sizes, strict=True)
    return [Side(side.logits, *part) for part in parts]


def check(
    student: Tensor, teacher: Tensor, batch: Mapping[str, Tensor], config: AcrossConfig, shared: Tensor | None
) -> None:
    gone = [name for name in NEEDED if name not in batch]
    if gone:
        raise InputError(
            f"batch: expected {', '.join(NEEDED)}, found no {', '.join(gone)}: it can't be told which logits are of "
            "one text; make the batches from AlignedRows or MaskedAlignedRows"
        )
    for name, logits in (("labels", student), ("teacher_labels", teacher)):
        if logits.shape[:2] != batch[name].shape:
            raise InputError(
                f"batch: {name} are of {tuple(batch[name].shape)} positions, the logits of {tuple(logits.shape[:2])}: "
                "spans would be read at the wrong ones"
            )
    if config.kind == "sorted":
        return
    if shared is None:
        raise InputError("across.kind spans: expected pairs of shared_vocabulary, found none; use sorted without them")
    sizes = (student.shape[-1], teacher.shape[-1])
    most = tuple(shared.max(0).values.tolist()) if len(shared) else (-1, -1)
    if most[0] >= sizes[0] or most[1] >= sizes[1]:
        raise InputError(
            f"shared vocabulary: expected ids of vocabularies of {sizes[0]} and {sizes[1]}, found {most[0]} and "
            f"{most[1]}: tokens would be matched to the wrong rows; give student and teacher in this order"
        )
