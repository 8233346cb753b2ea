"""Weighted sum of the loss terms, and each term's share of the gradient."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from distill.errors import InputError
from distill.losses.config import OF_PART, LossConfig
from distill.losses.features import ATTENTIONS, DISTANCES, EMBEDDINGS, SIMILARITIES, relation_kl
from distill.losses.fused import fused_sampled_cross_entropy, fused_topk_kl
from distill.losses.logits import DIVERGENCES, forward_kl, label_loss
from distill.losses.sparse import sampled_cross_entropy, topk_kl

MEAN_OVER = {
    **dict.fromkeys(("kl", "embedding", "similarity"), "rows"),
    **dict.fromkeys(("hidden", "attention", "relations"), "tokens"),
    "ce": "labels",
}
Pair = tuple[Tensor, Tensor]
NOTHING: Mapping[str, Sequence[Pair]] = {}


def loss_terms(
    config: LossConfig,
    student_logits: Float[Tensor, "rows classes"] | None,
    labels: Num[Tensor, "rows"] | None,
    mask: Int[Tensor, "batch length"],
    teacher: Mapping[str, Any],
    pairs: Mapping[str, Sequence[Pair]] = NOTHING,
) -> dict[str, Tensor]:
    """Returns the unweighted value of every term whose weight isn't 0.

    `mask` is that of `distill.losses.features`. `teacher` is read by the kl term alone, see `distribution_loss`.
    `pairs` are (student's, teacher's) by term: for `hidden` the states [batch, length, width], the student's already
    projected; for `attention` the scores [batch, heads, length, length]; for `relations` vectors [batch, length, width
    of each], such as the queries of both; for `embedding` one pair of vectors [batch, width], the student's already
    projected, and for `similarity` [batch, width of each]. Without logits and vectors, only the terms on layers are
    computed.
    """
    terms: dict[str, Tensor] = {}
    if config.kl and student_logits is not None and labels is not None:
        terms["kl"] = distribution_loss(student_logits, teacher, config.softness, divergence(config, labels))
    if config.ce and student_logits is not None and labels is not None:
        terms["ce"] = label_loss(student_logits, labels)
    if config.hidden:
        distance = DISTANCES[config.hidden_kind]
        terms["hidden"] = torch.stack([distance(s, t, mask) for s, t in pairs["hidden"]]).mean()
    if config.attention:
        apart = ATTENTIONS[config.attention_kind]
        terms["attention"] = torch.stack([apart(s, t, mask) for s, t in pairs["attention"]]).mean()
    if config.relations:
        found = [relation_kl(s, t, mask, heads=config.relation_heads) for s, t in pairs["relations"]]
        terms["relations"] = torch.stack(found).mean()
    for name, kinds, kind in (
        ("embedding", EMBEDDINGS, config.embedding_kind),
        ("similarity", SIMILARITIES, config.similarity_kind),
    ):
        if getattr(config, name) and name in pairs:
            terms[name] = kinds[kind](*pairs[name][0])
    return terms


def distribution_loss(
    student_logits: Float[Tensor, "rows classes"],
    teacher: Mapping[str, Any],
    temperature: float,
    dense: Callable[..., Tensor] = forward_kl,
) -> Float[Tensor, ""]:
    """Returns the kl term for the available form of the teacher's distribution, in nats.

    `teacher` holds `logits`: `dense` is used; or `ids` and `weights`: `sampled_cross_entropy`, larger than the KL by
    the teacher's entropy; or `ids`, `log_probs` and `tail`: `topk_kl`. A sample or top-k is valid at the `temperature`
    in the same mapping, 1 if there is none, and is scaled by its square like the rest. `classes` is the teacher's
    number of classes, see `common_classes`.

    Raises:
        InputError: None of these are given, a sample or top-k has another temperature or needs another divergence, or
            the logits have other classes than the student's without `classes`, which marks them as a vocabulary.
    """
    classes, teacher = common_classes(student_logits.shape[-1], teacher)
    student_logits = student_logits[:, :classes]
    if "logits" in teacher:
        return dense(student_logits, teacher["logits"], temperature=temperature)
    check_partial_distribution(teacher, temperature)
    student_logits = student_logits if temperature == 1 else student_logits / temperature
    if dense not in tuple(DIVERGENCES[name] for name in OF_PART):
        raise InputError(
            "loss.divergence: expected forward_kl, found another: a cached sample or top-k tells too little of the "
            "teacher's distribution"
        )
    if "weights" in teacher:
        return sampled_cross_entropy(student_logits, teacher["ids"], teacher["weights"]) * temperature**2
    return topk_kl(student_logits, teacher["ids"], teacher["log_probs"], teacher["tail"]) * temperature**2


def fused_distribution_loss(
    hidden: Float[Tensor, "rows width"], head: nn.Linear, teacher: Mapping[str, Any], temperature: float
) -> Float[Tensor, ""]:
    """`distribution_loss` of a sample or top-k, with the logits computed from the head's input in chunks.

    Raises:
        InputError: As in `distribution_loss`.
    """
    words = len(head.weight)
    classes, teacher = common_classes(words, teacher)
    check_partial_distribution(teacher, temperature)
    weight = head.weight if classes == words else head.weight[:classes]
    bias = None if head.bias is None else head.bias[:classes]
    if temperature != 1:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    if "weights" in teacher:
        value = fused_sampled_cross_entropy(hidden, weight, teacher["ids"], teacher["weights"], bias=bias)
    else:
        value = fused_topk_kl(hidden, weight, teacher["ids"], teacher["log_probs"], teacher["tail"], bias=bias)
    return value * temperature**2


def check_partial_distribution(teacher: Mapping[str, Any], temperature: float) -> None:
    if not teacher.keys() >= {"ids", "weights"} and not teacher.keys() >= {"ids", "log_probs", "tail"}:
        raise InputError(
            "loss.kl: expected the teacher's logits, ids and weights, or ids, log_probs and tail, found "
            f"{', '.join(sorted(teacher)) or 'nothing'}: there is no distribution to learn from"
        )
    known = float(teacher.get("temperature", 1.0))
    if temperature != known:
        raise InputError(
            f"loss.temperature: expected {known}, found {temperature}: a cached sample or top-k belongs to the "
            "temperature it was written at, and only the student would be softened"
        )


def common_classes(own: int, teacher: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Returns the number of classes that student and teacher have in common, and the teacher's signals for these.

    `own` is the student's number of classes. The common ones are the first of both; only rows that pad the larger
    vocabulary are excluded, as impossible on either side: dense logits are thereby renormalized to 1; for ids that the
    student lacks the weights are dropped, or for top-k their probability is added to the tail.
    """
    taught = teacher.get("classes")
    if "logits" in teacher and teacher["logits"].shape[-1] != (taught or own):
        raise InputError(
            f"loss.kl: expected as many classes as the teacher's {teacher['logits'].shape[-1]}, found the student's "
            f"{own}: classes would be matched to others"
        )
    if taught is None or taught == own:
        return own, teacher
    kept, teacher = min(own, taught), dict(teacher)
    if "logits" in teacher:
        teacher["logits"] = teacher["logits"][:, :kept]
    elif kept < taught and "ids" in teacher:
        gone = teacher["ids"] >= kept
        teacher["ids"] = teacher["ids"].masked_fill(gone, 0)
        if "weights" in teacher:
            teacher["weights"] = teacher["weights"].masked_fill(gone, 0)
        if "log_probs" in teacher:
            left = teacher["log_probs"].exp().masked_fill(~gone, 0).sum(-1)
            teacher["log_probs"] = teacher["log_probs"].masked_fill(gone, -torch.inf)
            teacher["tail"] = teacher["tail"] + left
    return kept, teacher


def divergence(config: LossConfig, labels: Num[Tensor, "rows"]) -> Callable[..., Tensor]:
    """Returns the objective on the teacher's whole distribution that the config names.

    For numeric labels this is `logit_mse`, which is twice the KL between normal distributions around the predictions.
    """
    if labels.is_floating_point():
        return DIVERGENCES["logit_mse"]
    loss = DIVERGENCES[config.divergence]
    if config.divergence == "decoupled_kl":
        alpha, beta = config.decoupled
        return partial(loss, labels=labels, alpha=alpha, beta=beta)
    if config.divergence == "jensen_shannon":
        return partial(loss, beta=config.beta)
    if config.divergence in ("skewed_kl", "skewed_reverse_kl"):
        return partial(loss, skew=config.skew)
    return loss


def scale_by_share(config: LossConfig, terms: Mapping[str, Tensor], shares: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns one process's terms scaled so that their average over the processes is that of the whole batch.

    `shares` are those of `distill.data.batches.share.shard_batch`.
    """
    over = MEAN_OVER | ({"kl": "labels"} if config.divergence == "decoupled_kl" else {})
    return {name: value * shares[over[name]] for name, value in terms.items()}


def weighted_sum(config: LossConfig, terms: Mapping[str, Tensor]) -> Tensor:
    """Returns the sum of weight · value."""
    return torch.stack([getattr(config, name) * value for name, value in terms.items()]).sum()


def gradient_shares(config: LossConfig, terms: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> dict[str, float]:
    """Returns each weighted term's gradient norm divided by the sum of the norms; costs one backward pass per term."""
    if len(terms) == 1:
        return dict.fromkeys(terms, 1.0)
    norms = {name: getattr(config, name) * norm for name, norm in gradient_norms(terms, parameters).items()}
    total = sum(norms.values()) or 1.0
    return {name: norm / total for name, norm in norms.items()}


def gradient_norms(terms: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> dict[str, float]:
    """Returns the norm of each term's unweighted gradient; the graph and existing gradients are preserved."""
    wanted = [p for p in parameters if p.requires_grad]
    norms = {}
    for name, value in terms.items():
        grads = torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
        norms[name] = torch.stack([g.float().norm() for g in grads if g is not None]).norm().item()
    return norms


def balanced(norms: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Returns weight factors that equalize gradients of these norms, averaged geometrically with the previous factors.

    Source: these factors are set directly, where GradNorm (Chen et al. 2018, arXiv 1711.02257, section 3.2), with its
    alpha of 0, learns them by a separate loss.
    """
    usual = sum(norms.values()) / len(norms)
    wanted = {name: usual / norm if norm > 0 else before.get(name, 1.0) for name, norm in norms.items()}
    return {name: (wanted[name] * before.get(name, wanted[name])) ** 0.5 for name in norms}
