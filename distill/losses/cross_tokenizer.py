"""Objectives between models with different tokenizers; p is the teacher's distribution, q the student's.

Logits are compared at spans, the shortest pieces of a text that both tokenizers encode in whole tokens. In the forward
pass, the distributions of some spans at a time are computed, turned into their gradient and released.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from distill.errors import InputError
from distill.losses.cross_tokenizer_config import CrossTokenizerConfig
from distill.losses.fused import CHUNK_BYTES
from distill.losses.logits import IGNORED, upcast
from distill.losses.spans import (
    Vocabularies,
    merge_spans,
    pair_outcomes,
    shared_divergence,
    sorted_l1,
    unshared_distance,
)

_REQUIRED = ("labels", "teacher_labels", "spans")


def sorted_distance(
    student: Float[Tensor, "rows vocabulary"],
    teacher: Float[Tensor, "rows teacher_vocabulary"],
    *,
    temperature: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Float[Tensor, ""]:
    """T² · mean over rows of Σ |p₍ᵢ₎ - q₍ᵢ₎|, with probabilities in descending order and the shorter padded with zeros.

    From 0 to 2 T², independent of which token has which probability. 0 without rows.

    Args:
        student: Logits; a gradient flows into these only.
        teacher: Logits.
        temperature: Softens both.
        chunk_bytes: Size of the distributions that exist at once.

    Source: Boizard et al. 2024, universal logit distillation (arXiv 2402.12030), without its cross-entropy.
    """
    rows = torch.arange(len(student), device=student.device)
    ones = torch.ones_like(rows)
    models = (_SpanLogits(student, rows, rows, ones), _SpanLogits(teacher, rows, rows, ones))
    return _mean_over_spans(*models, _sorted_distances, temperature, chunk_bytes)


def cross_tokenizer_loss(
    student_logits: Float[Tensor, "batch length vocabulary"],
    teacher_logits: Float[Tensor, "batch teacher_length teacher_vocabulary"],
    batch: Mapping[str, Tensor],
    config: CrossTokenizerConfig,
    shared: Int[Tensor, "shared 2"] | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Float[Tensor, ""]:
    """T² · mean, over the spans with labels in both models, of the distance that `config` names; 0 without such spans.

    `sorted`: of the two distributions over a span's first token. `spans`: w D + (1 - w) R, with D the divergence on the
    shared tokens and the span as a whole (`shared_divergence`), R the sorted distance on the other tokens, and w the
    shared weight. With one vocabulary and spans of one token, D is the plain divergence and R is 0.

    Args:
        student_logits: Padded; a gradient flows into these only.
        teacher_logits: Padded.
        batch: From `AlignedRows` or `MaskedAlignedRows`. `labels` [batch, length] and `teacher_labels` [batch,
            teacher_length] are the tokens to predict at each position, IGNORED elsewhere: for causal models the next
            token. `spans` [batch, spans, 4] are the positions that predict a span, first and end of the student's and
            of the teacher's; equal ones are padding.
        config: Kind, weights, temperature.
        shared: Pairs of ids with the same text, from `shared_vocabulary`; for `spans`.
        chunk_bytes: Size of the distributions that exist at once.

    Raises:
        InputError: The batch lacks entries, the logits and labels have different positions, or the shared vocabulary is
            missing or belongs to other models.

    Source: Boizard et al. 2024, universal logit distillation (arXiv 2402.12030), which compares the first position with
    the first and so on, where the models have mostly processed different texts; and GOLD, with the deviations described
    at `merge_spans` and `shared_divergence`. For a masked model, a span's probability is the product of its tokens'
    probabilities, each with all of them masked, which assumes that they are independent.
    """
    shared = shared if config.kind == "spans" else None
    _check_inputs(student_logits, teacher_logits, batch, config, shared)
    spans = batch["spans"]
    labelled = find_labelled_spans(spans, batch["labels"], batch["teacher_labels"])
    student = _select_spans(student_logits, batch["labels"], spans[..., :2], labelled)
    teacher = _select_spans(teacher_logits, batch["teacher_labels"], spans[..., 2:], labelled)
    if shared is None:
        student, teacher = _select_first_tokens(student), _select_first_tokens(teacher)
        return _mean_over_spans(student, teacher, _sorted_distances, config.temperature, chunk_bytes)
    vocabularies = Vocabularies.from_pairs(
        shared.long().to(student_logits.device), student_logits.shape[-1], teacher_logits.shape[-1]
    )

    def distance(q: _TokenDistributions, p: _TokenDistributions) -> Tensor:
        student_outcomes, teacher_outcomes = pair_outcomes(merge_spans(*q), merge_spans(*p), vocabularies)
        outcomes = (student_outcomes, teacher_outcomes, vocabularies)
        total = torch.zeros_like(student_outcomes.span)
        if config.shared_weight > 0:
            total = config.shared_weight * shared_divergence(*outcomes, config.beta)
        if config.shared_weight < 1:
            total = total + (1 - config.shared_weight) * unshared_distance(*outcomes)
        return total

    return _mean_over_spans(student, teacher, distance, config.temperature, chunk_bytes)


def find_labelled_spans(
    spans: Int[Tensor, "batch spans 4"],
    labels: Int[Tensor, "batch length"],
    teacher_labels: Int[Tensor, "batch teacher_length"],
) -> Bool[Tensor, "batch spans"]:
    """Returns the mask of spans with a label for every token in both models; padding is excluded.

    For masked models these are the spans that are masked for both.
    """
    mask = spans[..., 1] > spans[..., 0]
    for labelled, first, end in (
        (labels != IGNORED, spans[..., 0], spans[..., 1]),
        (teacher_labels != IGNORED, spans[..., 2], spans[..., 3]),
    ):
        before = F.pad(labelled.long().cumsum(1), (1, 0))
        mask = mask & (before.gather(1, end) - before.gather(1, first) == end - first)
    return mask


class _SpanLogits(NamedTuple):
    """One model's logits at spans.

    Args:
        logits: Logits of every position [positions, vocabulary].
        positions: The spans' positions, one span after the other [tokens].
        ids: The tokens to predict there [tokens].
        sizes: Number of tokens of each span [spans].
    """

    logits: Tensor
    positions: Tensor
    ids: Tensor
    sizes: Tensor


class _TokenDistributions(NamedTuple):
    """Log-probabilities [tokens, vocabulary] at the positions that predict `ids`, the tokens of spans of `sizes`."""

    log_probs: Tensor
    ids: Tensor
    sizes: Tensor


def _select_spans(logits: Tensor, labels: Tensor, bounds: Tensor, mask: Tensor) -> _SpanLogits:
    """Returns the logits at the spans in `mask` [batch, spans], with `bounds` [batch, spans, 2] (first, end)."""
    length = labels.shape[1]
    row = torch.arange(len(labels), device=labels.device)[:, None].expand_as(mask)[mask]
    first, end = bounds[mask].unbind(-1)
    sizes = end - first
    starts = (row * length + first - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
    positions = starts + torch.arange(len(starts), device=labels.device)
    return _SpanLogits(logits.flatten(0, 1), positions, labels.flatten()[positions], sizes)


def _select_first_tokens(model: _SpanLogits) -> _SpanLogits:
    """Returns a model's logits at only the first token of each span."""
    first = model.sizes.cumsum(0) - model.sizes
    return _SpanLogits(model.logits, model.positions[first], model.ids[first], torch.ones_like(model.sizes))


def _sorted_distances(q: _TokenDistributions, p: _TokenDistributions) -> Tensor:
    return sorted_l1(q.log_probs.exp(), p.log_probs.exp())


# (student's distributions, teacher's distributions) at the tokens of some spans -> [spans]
_SpanDistance = Callable[[_TokenDistributions, _TokenDistributions], Tensor]


def _mean_over_spans(
    student: _SpanLogits, teacher: _SpanLogits, distance: _SpanDistance, temperature: float, chunk_bytes: int
) -> Tensor:
    """Returns T² · mean over spans of a distance of the softened distributions, with a gradient for the student."""
    total: Tensor = _SumOverSpans.apply(student.logits, student, teacher, distance, temperature, chunk_bytes)
    return total * temperature**2 / max(1, len(student.sizes))


class _SumOverSpans(torch.autograd.Function):
    """Sum of a distance over spans; no position belongs to two spans, so each gets its gradient from one chunk."""

    @staticmethod
    def forward(
        ctx: BackwardCFunction,
        logits: Tensor,
        student: _SpanLogits,
        teacher: _SpanLogits,
        distance: _SpanDistance,
        temperature: float,
        chunk_bytes: int,
    ) -> Tensor:
        needs_gradient = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(logits) if needs_gradient else None
        total = torch.zeros((), dtype=upcast(logits[:0]).dtype, device=logits.device)
        counts = _chunk_sizes(student, teacher, chunk_bytes)
        for student_part, teacher_part in zip(
            _split_spans(student, counts), _split_spans(teacher, counts), strict=True
        ):
            with torch.enable_grad():
                z = upcast(logits.detach()[student_part.positions]).requires_grad_(needs_gradient)
                q = _distributions(student_part, z, temperature)
                p = _distributions(teacher_part, upcast(teacher.logits[teacher_part.positions].detach()), temperature)
                value = distance(q, p).sum()
            total += value.detach()
            if gradient is not None:
                gradient[student_part.positions] = torch.autograd.grad(value, z)[0].to(gradient.dtype)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Not modified: compute_gradient_shares runs backward before the step does.
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, *[None] * 5


def _distributions(part: _SpanLogits, logits: Tensor, temperature: float) -> _TokenDistributions:
    return _TokenDistributions((logits / temperature).log_softmax(-1), part.ids, part.sizes)


def _chunk_sizes(student: _SpanLogits, teacher: _SpanLogits, chunk_bytes: int) -> list[int]:
    """Returns numbers of spans whose distributions together take about `chunk_bytes`, give or take a span."""
    student_bytes, teacher_bytes = (
        model.logits.shape[1] * upcast(model.logits[:0]).element_size() for model in (student, teacher)
    )
    size = student.sizes * student_bytes + teacher.sizes * teacher_bytes
    chunk = size.cumsum(0) // max(1, chunk_bytes)
    counts: list[int] = torch.unique_consecutive(chunk, return_counts=True)[1].tolist()
    return counts


def _split_spans(model: _SpanLogits, counts: list[int]) -> list[_SpanLogits]:
    sizes = model.sizes.split(counts)
    tokens = [int(each.sum()) for each in sizes]
    parts = zip(model.positions.split(tokens), model.ids.split(tokens), sizes, strict=True)
    return [_SpanLogits(model.logits, *part) for part in parts]


def _check_inputs(
    student: Tensor, teacher: Tensor, batch: Mapping[str, Tensor], config: CrossTokenizerConfig, shared: Tensor | None
) -> None:
    missing = [name for name in _REQUIRED if name not in batch]
    if missing:
        raise InputError(
            f"batch: expected {', '.join(_REQUIRED)}, found no {', '.join(missing)}: the models' logits can't "
            "be matched by text; collate the batches with AlignedRows or MaskedAlignedRows"
        )
    for name, logits in (("labels", student), ("teacher_labels", teacher)):
        if logits.shape[:2] != batch[name].shape:
            raise InputError(
                f"batch: expected logits of {tuple(batch[name].shape)} positions as {name} has, found "
                f"{tuple(logits.shape[:2])}: spans would be read at the wrong positions"
            )
    if config.kind == "sorted":
        return
    if shared is None:
        raise InputError(
            "cross_tokenizer.kind spans: expected the pairs of shared_vocabulary, found none: tokens can't be "
            "matched; pass them, or use cross_tokenizer.kind sorted"
        )
    sizes = (student.shape[-1], teacher.shape[-1])
    largest = tuple(shared.max(0).values.tolist()) if len(shared) else (-1, -1)
    if largest[0] >= sizes[0] or largest[1] >= sizes[1]:
        raise InputError(
            f"shared vocabulary: expected ids below {sizes[0]} and {sizes[1]}, found {largest[0]} and {largest[1]}: "
            "tokens would be matched to the wrong logits; build the pairs from student and teacher in this order"
        )
