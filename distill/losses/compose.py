"""Weighted sum of the loss terms, and each term's share of the gradient."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from distill.errors import InputError
from distill.losses.config import SPARSE_DIVERGENCES, LossConfig
from distill.losses.features import (
    ATTENTION_DISTANCES,
    EMBEDDING_DISTANCES,
    HIDDEN_DISTANCES,
    SIMILARITY_DISTANCES,
    relation_kl,
)
from distill.losses.fused import fused_sampled_cross_entropy, fused_topk_kl
from distill.losses.logits import DIVERGENCE_FUNCTIONS, IGNORED, forward_kl, label_loss
from distill.losses.sparse import sampled_cross_entropy, topk_kl
from distill.losses.teacher_signals import TeacherSignals

_AVERAGED_OVER = {
    **dict.fromkeys(("kl", "embedding", "similarity"), "rows"),
    **dict.fromkeys(("hidden", "attention", "relations"), "tokens"),
    "ce": "labels",
}
TensorPair = tuple[Tensor, Tensor]  # the student's, the teacher's
_NO_PAIRS: Mapping[str, Sequence[TensorPair]] = {}


def compute_loss_terms(
    config: LossConfig,
    student_logits: Float[Tensor, "rows classes"] | None,
    labels: Num[Tensor, "rows"] | None,
    mask: Int[Tensor, "batch length"],
    teacher: TeacherSignals,
    pairs: Mapping[str, Sequence[TensorPair]] = _NO_PAIRS,
) -> dict[str, Tensor]:
    """Returns the unweighted value of every term whose weight isn't 0.

    Without logits and vectors, only the terms on layers are computed; without any row, `kl` and `ce` are 0.

    Args:
        config: Weights and settings of the terms.
        student_logits: Read by `kl` and `ce`.
        labels: Classes or numbers, IGNORED where a row has no label.
        mask: 0 at padding, else the number of the text in its row, see `distill.losses.features`.
        teacher: Read by `kl`, see `distribution_loss`.
        pairs: (Student's, teacher's) tensors by term: for `hidden` the states [batch, length, width], the student's
            already projected; for `attention` the scores [batch, heads, length, length]; for `relations` vectors
            [batch, length, width of each], such as the queries of both; for `embedding` one pair of vectors
            [batch, width], the student's already projected; for `similarity` one pair [batch, width of each].

    Raises:
        InputError: As in `distribution_loss` and `features.relation_kl`.
    """
    terms: dict[str, Tensor] = {}
    if config.kl and student_logits is not None and labels is not None:
        dense = select_divergence(config, labels)
        if len(student_logits):
            terms["kl"] = distribution_loss(student_logits, teacher, config.resolved_temperature, dense)
        else:  # a 0 with an autograd graph: in its backward pass other processes get gradients of their positions
            terms["kl"] = student_logits.sum()
    if config.ce and student_logits is not None and labels is not None:
        terms["ce"] = label_loss(student_logits, labels)
    if config.hidden:
        distance = HIDDEN_DISTANCES[config.hidden_kind]
        terms["hidden"] = torch.stack([distance(s, t, mask) for s, t in pairs["hidden"]]).mean()
    if config.attention:
        distance = ATTENTION_DISTANCES[config.attention_kind]
        terms["attention"] = torch.stack([distance(s, t, mask) for s, t in pairs["attention"]]).mean()
    if config.relations:
        values = [relation_kl(s, t, mask, heads=config.relation_heads) for s, t in pairs["relations"]]
        terms["relations"] = torch.stack(values).mean()
    for name, distances, kind in (
        ("embedding", EMBEDDING_DISTANCES, config.embedding_kind),
        ("similarity", SIMILARITY_DISTANCES, config.similarity_kind),
    ):
        if getattr(config, name) and name in pairs:
            terms[name] = distances[kind](*pairs[name][0])
    return terms


def distribution_loss(
    student_logits: Float[Tensor, "rows classes"],
    teacher: TeacherSignals,
    temperature: float,
    dense: Callable[..., Tensor] = forward_kl,
) -> Float[Tensor, ""]:
    """Returns the kl term for the available form of the teacher's distribution, in nats.

    Args:
        student_logits: A gradient flows into these.
        teacher: Either `logits`: `dense` is used; or `ids` and `weights`: `sampled_cross_entropy`, larger than the KL
            by the teacher's entropy; or `ids`, `log_probs` and `tail`: `topk_kl`. A sample or top-k is valid at its
            `temperature`, 1 if there is none, and is scaled by its square like the rest. `classes`, the teacher's
            number of classes, marks them as a vocabulary, of which only the part that both models have is compared.
        temperature: Softens both distributions.
        dense: Called with the logits of student and teacher and the temperature.

    Raises:
        InputError: The signals contain none of these forms, a sample or top-k has another temperature or needs another
            divergence, or the logits have other classes than the student's without `classes`.
    """
    classes, teacher = _restrict_to_common_classes(student_logits.shape[-1], teacher)
    student_logits = student_logits[:, :classes]
    if "logits" in teacher:
        return dense(student_logits, teacher["logits"], temperature=temperature)
    _check_sparse_distribution(teacher, temperature)
    student_logits = student_logits if temperature == 1 else student_logits / temperature
    if dense not in tuple(DIVERGENCE_FUNCTIONS[name] for name in SPARSE_DIVERGENCES):
        raise InputError(
            f"loss.divergence: expected {' or '.join(SPARSE_DIVERGENCES)}, found another: a cached sample or top-k "
            "contains too little of the teacher's distribution"
        )
    if "weights" in teacher:
        return sampled_cross_entropy(student_logits, teacher["ids"], teacher["weights"]) * temperature**2
    return topk_kl(student_logits, teacher["ids"], teacher["log_probs"], teacher["tail"]) * temperature**2


def fused_distribution_loss(
    hidden: Float[Tensor, "rows width"], head: nn.Linear, teacher: TeacherSignals, temperature: float
) -> Float[Tensor, ""]:
    """`distribution_loss` of a sample or top-k, with the logits computed from the head's input in chunks.

    Args:
        hidden: Inputs of the head.
        head: The student's language-modelling head.
        teacher: A sample or top-k, as in `distribution_loss`.
        temperature: Softens both distributions.

    Raises:
        InputError: As in `distribution_loss`.
    """
    vocabulary_size = len(head.weight)
    classes, teacher = _restrict_to_common_classes(vocabulary_size, teacher)
    _check_sparse_distribution(teacher, temperature)
    weight = head.weight if classes == vocabulary_size else head.weight[:classes]
    bias = None if head.bias is None else head.bias[:classes]
    if temperature != 1:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    if "weights" in teacher:
        value = fused_sampled_cross_entropy(hidden, weight, teacher["ids"], teacher["weights"], bias=bias)
    else:
        value = fused_topk_kl(hidden, weight, teacher["ids"], teacher["log_probs"], teacher["tail"], bias=bias)
    return value * temperature**2


def fused_label_loss(
    hidden: Float[Tensor, "rows width"], head: nn.Linear, labels: Int[Tensor, "rows"]
) -> Float[Tensor, ""]:
    """`cross_entropy` with the logits computed from the head's input in chunks.

    Args:
        hidden: Inputs of the head.
        head: The student's language-modelling head.
        labels: Ids of tokens; rows with `IGNORED` are ignored.
    """
    labelled = labels != IGNORED
    ids = labels[labelled][:, None]
    weights = torch.ones(ids.shape, device=ids.device)
    return fused_sampled_cross_entropy(hidden[labelled], head.weight, ids, weights, bias=head.bias)


def _check_sparse_distribution(teacher: TeacherSignals, temperature: float) -> None:
    if not teacher.keys() >= {"ids", "weights"} and not teacher.keys() >= {"ids", "log_probs", "tail"}:
        raise InputError(
            "loss.kl: expected the teacher's logits, ids and weights, or ids, log_probs and tail, found "
            f"{', '.join(sorted(teacher)) or 'nothing'}: there is no distribution to learn from"
        )
    stored = float(teacher.get("temperature", 1.0))
    if temperature != stored:
        raise InputError(
            f"loss.temperature: expected {stored}, found {temperature}: a cached sample or top-k is valid only at the "
            "temperature it was written with, and only the student would be softened"
        )


def _restrict_to_common_classes(student_classes: int, teacher: TeacherSignals) -> tuple[int, TeacherSignals]:
    """Returns the number of classes that student and teacher have in common, and the teacher's signals for these.

    These are the first classes of both; only rows that pad the larger vocabulary are excluded, as impossible on either
    side: dense logits are thereby renormalized to 1; for ids that the student lacks the weights are dropped, or for
    top-k their probability is added to the tail.
    """
    teacher_classes = teacher.get("classes")
    if "logits" in teacher and teacher["logits"].shape[-1] != (teacher_classes or student_classes):
        raise InputError(
            f"loss.kl: expected as many classes as the teacher's {teacher['logits'].shape[-1]}, found the student's "
            f"{student_classes}: classes would be matched to others"
        )
    if teacher_classes is None or teacher_classes == student_classes:
        return student_classes, teacher
    common, teacher = min(student_classes, teacher_classes), teacher.copy()
    if "logits" in teacher:
        teacher["logits"] = teacher["logits"][:, :common]
    elif common < teacher_classes and "ids" in teacher:
        excluded = teacher["ids"] >= common
        teacher["ids"] = teacher["ids"].masked_fill(excluded, 0)
        if "weights" in teacher:
            teacher["weights"] = teacher["weights"].masked_fill(excluded, 0)
        if "log_probs" in teacher:
            excluded_probability = teacher["log_probs"].exp().masked_fill(~excluded, 0).sum(-1)
            teacher["log_probs"] = teacher["log_probs"].masked_fill(excluded, -torch.inf)
            teacher["tail"] = teacher["tail"] + excluded_probability
    return common, teacher


def select_divergence(config: LossConfig, labels: Num[Tensor, "rows"]) -> Callable[..., Tensor]:
    """Returns the objective on the teacher's full distribution that the config names.

    For numeric labels this is `logit_mse`, which is twice the KL between normal distributions around the predictions.
    """
    if labels.is_floating_point():
        return DIVERGENCE_FUNCTIONS["logit_mse"]
    loss = DIVERGENCE_FUNCTIONS[config.divergence]
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

    `shares` are those of `distill.data.batches.sharding.shard_batch`.
    """
    averaged_over = _AVERAGED_OVER | ({"kl": "labels"} if config.divergence == "decoupled_kl" else {})
    return {name: value * shares[averaged_over[name]] for name, value in terms.items()}


def weighted_sum(config: LossConfig, terms: Mapping[str, Tensor]) -> Tensor:
    """Returns the sum of weight · value over the terms."""
    return torch.stack([getattr(config, name) * value for name, value in terms.items()]).sum()


def compute_gradient_shares(
    config: LossConfig, terms: Mapping[str, Tensor], parameters: Iterable[Tensor]
) -> dict[str, float]:
    """Returns each weighted term's gradient norm divided by the sum of the norms; costs one backward pass per term."""
    if len(terms) == 1:
        return dict.fromkeys(terms, 1.0)
    norms = {name: getattr(config, name) * norm for name, norm in compute_gradient_norms(terms, parameters).items()}
    total = sum(norms.values()) or 1.0
    return {name: norm / total for name, norm in norms.items()}


def compute_gradient_norms(terms: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> dict[str, float]:
    """Returns the norm of each term's unweighted gradient; the graph and existing gradients are preserved."""
    trained = [p for p in parameters if p.requires_grad]
    norms = {}
    for name, value in terms.items():
        # A term may depend on frozen weights only.
        grads = torch.autograd.grad(value, trained, retain_graph=True, allow_unused=True) if value.requires_grad else ()
        parts = [g.float().norm() for g in grads if g is not None]
        norms[name] = torch.stack(parts).norm().item() if parts else 0.0
    return norms


def compute_balance_factors(norms: Mapping[str, float], previous: Mapping[str, float]) -> dict[str, float]:
    """Returns weight factors that equalize these gradient norms, averaged geometrically with the previous factors.

    A term without a gradient in this step keeps its previous factor, and the others aren't compared with it.

    Source: these factors are set directly, where GradNorm (Chen et al. 2018, arXiv 1711.02257, section 3.2), with its
    alpha of 0, learns them by a separate loss.
    """
    measured = {name: norm for name, norm in norms.items() if norm > 0}
    targets = {name: sum(measured.values()) / len(measured) / norm for name, norm in measured.items()}
    factors = {name: (target * previous.get(name, target)) ** 0.5 for name, target in targets.items()}
    return dict.fromkeys(norms, 1.0) | dict(previous) | factors
