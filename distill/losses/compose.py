"""The weighted sum of terms, and how much each pulls."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.features import DISTANCES
from distill.losses.logits import cross_entropy, forward_kl
from distill.losses.sparse import sampled_cross_entropy, topk_kl

MEAN_OVER = {"kl": "rows", "ce": "labels", "hidden": "tokens"}
Hidden = Sequence[Float[Tensor, "batch length _"]]


def loss_terms(
    config: LossConfig,
    student_logits: Float[Tensor, "rows classes"],
    labels: Int[Tensor, "rows"],
    mask: Int[Tensor, "batch length"],
    teacher: Mapping[str, Tensor],
    hidden_pairs: Sequence[tuple[Tensor, Tensor]] = (),
) -> dict[str, Tensor]:
    """Value of every term whose weight isn't 0, unweighted.

    `teacher` is read by the kl term alone, see `distribution_loss`. `hidden_pairs` are (student, teacher) hidden
    states [batch, length, width], the student's already projected.
    """
    terms: dict[str, Tensor] = {}
    if config.kl:
        terms["kl"] = distribution_loss(student_logits, teacher, config.temperature)
    if config.ce:
        terms["ce"] = cross_entropy(student_logits, labels)
    if config.hidden:
        distance = DISTANCES[config.hidden_kind]
        terms["hidden"] = torch.stack([distance(s, t, mask) for s, t in hidden_pairs]).mean()
    return terms


def distribution_loss(
    student_logits: Float[Tensor, "rows classes"], teacher: Mapping[str, Tensor], temperature: float
) -> Float[Tensor, ""]:
    """The kl term by what is known of the teacher's distribution, in nats.

    `teacher` holds `logits`: `forward_kl`; or `ids` and `weights`: `sampled_cross_entropy`, larger than the KL by the
    teacher's entropy; or `ids`, `log_probs` and `tail`: `topk_kl`.

    Raises:
        InputError: None of these, or a sample or top-k with a temperature other than 1.
    """
    if "logits" in teacher:
        return forward_kl(student_logits, teacher["logits"], temperature=temperature)
    if not teacher.keys() >= {"ids", "weights"} and not teacher.keys() >= {"ids", "log_probs", "tail"}:
        raise InputError(
            "loss.kl: expected the teacher's logits, ids and weights, or ids, log_probs and tail, found "
            f"{', '.join(sorted(teacher)) or 'nothing'}: there is no distribution to learn from"
        )
    if temperature != 1:
        raise InputError(
            f"loss.temperature: expected 1.0, found {temperature}: a cached sample or top-k belongs to the temperature "
            "it was written at, and only the student would be softened"
        )
    if "weights" in teacher:
        return sampled_cross_entropy(student_logits, teacher["ids"], teacher["weights"])
    return topk_kl(student_logits, teacher["ids"], teacher["log_probs"], teacher["tail"])


def shared(terms: Mapping[str, Tensor], shares: Mapping[str, float]) -> dict[str, Tensor]:
    """Terms of one process's rows scaled so that their average over the processes is that of the whole batch.

    `shares` are those of `distill.data.share.share_of`.
    """
    return {name: value * shares[MEAN_OVER[name]] for name, value in terms.items()}


def weighted_sum(config: LossConfig, terms: Mapping[str, Tensor]) -> Tensor:
    """Sum of weight · value."""
    return torch.stack([getattr(config, name) * value for name, value in terms.items()]).sum()


def gradient_shares(config: LossConfig, terms: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> dict[str, float]:
    """Norm of each weighted term's gradient divided by the sum of the norms; costs one backward pass a term."""
    if len(terms) == 1:
        return dict.fromkeys(terms, 1.0)
    wanted = [p for p in parameters if p.requires_grad]
    norms = {}
    for name, value in terms.items():
        grads = torch.autograd.grad(getattr(config, name) * value, wanted, retain_graph=True, allow_unused=True)
        norms[name] = torch.stack([g.float().norm() for g in grads if g is not None]).norm().item()
    total = sum(norms.values()) or 1.0
    return {name: norm / total for name, norm in norms.items()}
