"""The weighted sum of terms, and how much each pulls."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from distill.losses.config import LossConfig
from distill.losses.features import hidden_cosine, hidden_mse
from distill.losses.logits import cross_entropy, forward_kl

Hidden = Sequence[Float[Tensor, "batch length _"]]


def loss_terms(
    config: LossConfig,
    student_logits: Float[Tensor, "rows classes"],
    labels: Int[Tensor, "rows"],
    mask: Int[Tensor, "batch length"],
    teacher_logits: Float[Tensor, "rows classes"] | None = None,
    hidden_pairs: Sequence[tuple[Tensor, Tensor]] = (),
) -> dict[str, Tensor]:
    """Value of every term whose weight isn't 0, unweighted.

    `hidden_pairs` are (student, teacher) hidden states [batch, length, width], the student's already projected.
    """
    terms: dict[str, Tensor] = {}
    if config.kl:
        assert teacher_logits is not None, "the kl term needs teacher logits"
        terms["kl"] = forward_kl(student_logits, teacher_logits, temperature=config.temperature)
    if config.ce:
        terms["ce"] = cross_entropy(student_logits, labels)
    if config.hidden:
        distance = {"mse": hidden_mse, "cosine": hidden_cosine}[config.hidden_kind]
        terms["hidden"] = torch.stack([distance(s, t, mask) for s, t in hidden_pairs]).mean()
    return terms


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
