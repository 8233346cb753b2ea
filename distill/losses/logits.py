"""Objectives on the output distribution; p is the teacher's, q the student's; each is a mean over rows in nats.

A class with a logit of -inf, such as the padding of a vocabulary, contributes nothing.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor

IGNORED = -100  # the label of a row that losses and metrics leave out
RowDivergence = Callable[[Tensor, Tensor], Tensor]  # (log p, log q), each [rows, classes] -> [rows]


def forward_kl(
    student: Float[Tensor, "rows classes"], teacher: Float[Tensor, "rows classes"], *, temperature: float = 1.0
) -> Float[Tensor, ""]:
    """T² · mean over rows of KL(softmax(teacher/T) ‖ softmax(student/T)), in nats.

    The factor T² keeps the gradient's magnitude when T changes; the objectives below include it too.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2; minus the teacher's entropy, a constant there.
    """
    return _mean_softened(student, teacher, temperature, row_kl)


def reverse_kl(
    student: Float[Tensor, "rows classes"], teacher: Float[Tensor, "rows classes"], *, temperature: float = 1.0
) -> Float[Tensor, ""]:
    """T² · mean of KL(q ‖ p): mode-seeking, so the student may ignore some classes that the teacher finds likely.

    Source: Gu et al. 2024, MiniLLM (arXiv 2306.08543), section 2.1; here for each position separately.
    """
    return _mean_softened(student, teacher, temperature, lambda p, q: row_kl(q, p))


def jensen_shannon(
    student: Float[Tensor, "rows classes"],
    teacher: Float[Tensor, "rows classes"],
    *,
    temperature: float = 1.0,
    beta: float = 0.5,
) -> Float[Tensor, ""]:
    """T² · mean of β KL(p ‖ m) + (1 - β) KL(q ‖ m), with m = β p + (1 - β) q.

    Divided by β it approaches the forward KL as β goes to 0; divided by 1 - β it approaches the reverse KL as β goes to
    1.

    Source: Agarwal et al. 2024, generalized knowledge distillation (arXiv 2306.13649), equation 1.
    """

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        m = log_mixture(p, q, beta)
        return beta * row_kl(p, m) + (1 - beta) * row_kl(q, m)

    return _mean_softened(student, teacher, temperature, divergence)


def skewed_kl(
    student: Float[Tensor, "rows classes"],
    teacher: Float[Tensor, "rows classes"],
    *,
    temperature: float = 1.0,
    skew: float = 0.1,
) -> Float[Tensor, ""]:
    """T² · mean of KL(p ‖ α p + (1 - α) q), α the skew: at most -log α per row, so no class has an unbounded effect.

    Source: Ko et al. 2024, DistiLLM (arXiv 2402.03898), equation 2.
    """
    return _mean_softened(student, teacher, temperature, lambda p, q: row_kl(p, log_mixture(p, q, skew)))


def skewed_reverse_kl(
    student: Float[Tensor, "rows classes"],
    teacher: Float[Tensor, "rows classes"],
    *,
    temperature: float = 1.0,
    skew: float = 0.1,
) -> Float[Tensor, ""]:
    """T² · mean of KL(q ‖ (1 - α) p + α q), where α is the skew.

    Source: Ko et al. 2024, DistiLLM (arXiv 2402.03898), section 3.1.
    """
    return _mean_softened(student, teacher, temperature, lambda p, q: row_kl(q, log_mixture(q, p, skew)))


def total_variation(
    student: Float[Tensor, "rows classes"], teacher: Float[Tensor, "rows classes"], *, temperature: float = 1.0
) -> Float[Tensor, ""]:
    """T² · mean of ½ Σ |p - q|, from 0 to T².

    Source: Wen et al. 2023, f-distill (arXiv 2307.15190), section 2.2, for each position separately.
    """
    return _mean_softened(student, teacher, temperature, lambda p, q: 0.5 * (p.exp() - q.exp()).abs().sum(-1))


def soft_cross_entropy(
    student: Float[Tensor, "rows classes"], teacher: Float[Tensor, "rows classes"], *, temperature: float = 1.0
) -> Float[Tensor, ""]:
    """T² · mean of -Σ p log q: the forward KL plus the teacher's entropy, so its gradient is the same.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2.
    """
    return _mean_softened(student, teacher, temperature, lambda p, q: -row_expectation(p, q))


def decoupled_kl(
    student: Float[Tensor, "rows classes"],
    teacher: Float[Tensor, "rows classes"],
    labels: Int[Tensor, "rows"],
    *,
    temperature: float = 1.0,
    alpha: float = 1.0,
    beta: float = 8.0,
) -> Float[Tensor, ""]:
    """T² · mean over labelled rows of α KL(b_p ‖ b_q) + β KL(p̂ ‖ q̂); 0 if no row has a label.

    b is the probability of the label and of the rest; p̂ and q̂ are the distributions within the rest. With α = 1 and,
    for each row, β = the teacher's probability of the rest it would be the forward KL.

    Source: Zhao et al. 2022, DKD (arXiv 2203.08679), equation 7; the defaults are its values for CIFAR-100.
    """
    labelled = labels != IGNORED
    column = labels[labelled, None]

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        (label_p, rest_p), (label_q, rest_q) = (_split_label(column, each) for each in (p, q))
        return alpha * row_kl(label_p, label_q) + beta * row_kl(rest_p, rest_q)

    if not len(column):
        return _mean_softened(student, student.detach(), temperature, row_kl)  # 0, with an autograd graph
    return _mean_softened(student[labelled], teacher[labelled], temperature, divergence)


def logit_mse(
    student: Float[Tensor, "rows classes"], teacher: Float[Tensor, "rows classes"], *, temperature: float = 1.0
) -> Float[Tensor, ""]:
    """Mean squared difference of the logits over rows and classes, independent of the temperature.

    Source: Ba and Caruana 2014 (arXiv 1312.6184), equation 1.
    """
    student, teacher, counts = _mask_impossible(student, teacher)
    return (student - teacher).square().sum() / counts.sum().clamp(min=1)


def logit_cosine(
    student: Float[Tensor, "rows classes"], teacher: Float[Tensor, "rows classes"], *, temperature: float = 1.0
) -> Float[Tensor, ""]:
    """Mean of 1 - cos(student, teacher) over rows, independent of the temperature."""
    student, teacher, _ = _mask_impossible(student, teacher)
    return (1 - F.cosine_similarity(student, teacher, dim=-1)).mean()


def cross_entropy(
    student: Float[Tensor, "rows classes"], labels: Int[Tensor, "rows"], *, ignored: int = IGNORED
) -> Float[Tensor, ""]:
    """Mean over labelled rows of -log softmax(student)[label], in nats; 0 if no row has a label."""
    total = F.cross_entropy(student.float(), labels, ignore_index=ignored, reduction="sum")
    return total / (labels != ignored).sum().clamp(min=1)


def squared_error(
    student: Float[Tensor, "rows 1"], labels: Float[Tensor, "rows"], *, ignored: float = IGNORED
) -> Float[Tensor, ""]:
    """Mean over labelled rows of (student - label)², for numeric labels; 0 if no row has a label."""
    labelled = labels != ignored
    return ((student.float()[:, 0] - labels).square() * labelled).sum() / labelled.sum().clamp(min=1)


def label_loss(student: Float[Tensor, "rows _"], labels: Num[Tensor, "rows"]) -> Float[Tensor, ""]:
    """`cross_entropy` for classes, `squared_error` for numeric labels."""
    return squared_error(student, labels) if labels.is_floating_point() else cross_entropy(student, labels)


def _mean_softened(student: Tensor, teacher: Tensor, temperature: float, divergence: RowDivergence) -> Tensor:
    """T² · mean over rows of a divergence of the softened distributions."""
    p, q = (F.log_softmax(upcast(logits) / temperature, dim=-1) for logits in (teacher, student))
    return divergence(p, q).mean() * temperature**2


def upcast(logits: Tensor) -> Tensor:
    """Returns the logits in at least float32: in bf16 the tail of the log-softmax is lost."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _mask_impossible(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns both logits with 0 where either is -inf, and each row's number of remaining classes."""
    student, teacher = upcast(student), upcast(teacher)
    impossible = (student == -torch.inf) | (teacher == -torch.inf)
    return student.masked_fill(impossible, 0), teacher.masked_fill(impossible, 0), (~impossible).sum(-1)


def row_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of each row [rows], from log-probabilities [rows, classes]."""
    return row_expectation(p, p - q)


def row_expectation(p: Tensor, values: Tensor) -> Tensor:
    """Σ p · values of each row [rows], for log-probabilities `p`; where p is 0 the value is ignored, even NaN."""
    return (p.exp() * values.masked_fill(p == -torch.inf, 0)).sum(-1)


def log_mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
    """Log of share · p + (1 - share) · q, from log-probabilities of any shape."""
    impossible = (p == -torch.inf) & (q == -torch.inf)  # the gradient of logaddexp would be NaN
    parts = (p.masked_fill(impossible, 0) + math.log(share), q.masked_fill(impossible, 0) + math.log1p(-share))
    return torch.logaddexp(*parts).masked_fill(impossible, -torch.inf)


def _split_label(column: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of (the label, any other class) [rows, 2], and within the others [rows, classes]."""
    label = log_p.gather(1, column)
    others = log_p.scatter(1, column, -torch.inf)
    total = others.logsumexp(-1, keepdim=True)
    return torch.cat([label, total], -1), others - total


DIVERGENCE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "skewed_kl": skewed_kl,
    "skewed_reverse_kl": skewed_reverse_kl,
    "total_variation": total_variation,
    "soft_cross_entropy": soft_cross_entropy,
    "decoupled_kl": decoupled_kl,
    "logit_mse": logit_mse,
    "logit_cosine": logit_cosine,
}
