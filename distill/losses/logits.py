"""Objectives on the output distribution."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def forward_kl(
    student: Float[Tensor, "rows classes"], teacher: Float[Tensor, "rows classes"], *, temperature: float = 1.0
) -> Float[Tensor, ""]:
    """T² · mean over rows of KL(softmax(teacher/T) ‖ softmax(student/T)), in nats.

    The factor T² keeps the gradient's size when T changes.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2; less the teacher's entropy, a constant there.
    """
    # float32: in bf16 the tail of log-softmax is lost
    p = F.log_softmax(teacher.float() / temperature, dim=-1)
    q = F.log_softmax(student.float() / temperature, dim=-1)
    return F.kl_div(q, p, reduction="batchmean", log_target=True) * temperature**2


def cross_entropy(
    student: Float[Tensor, "rows classes"], labels: Int[Tensor, "rows"], *, ignored: int = -100
) -> Float[Tensor, ""]:
    """Mean over labelled rows of -log softmax(student)[label], in nats; 0 when no row has a label."""
    total = F.cross_entropy(student.float(), labels, ignore_index=ignored, reduction="sum")
    return total / (labels != ignored).sum().clamp(min=1)
