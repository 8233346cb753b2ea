"""Several teachers as one: distributions mixed by a weight for each, or by how sure each is of a row."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from distill.losses.logits import expected, widened


def mixture(
    teachers: Sequence[Float[Tensor, "rows classes"]],
    weights: Float[Tensor, "rows teachers"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "rows classes"]:
    """Logits whose softmax at the temperature is Σ wᵢ softmax(teacherᵢ / T); they stand in for one teacher's.

    Source: You et al. 2017 (doi 10.1145/3097983.3098135), section 3.2, with weights a row.
    """
    softened = torch.stack([F.log_softmax(widened(each) / temperature, dim=-1) for each in teachers], dim=-1)
    return (softened + widened(weights).log()[:, None]).logsumexp(-1) * temperature


def by_weight(
    teachers: Sequence[Float[Tensor, "rows classes"]], weights: Sequence[float]
) -> Float[Tensor, "rows teachers"]:
    """The same weights for every row, with a sum of 1."""
    given = torch.tensor(weights, device=teachers[0].device)
    return (given / given.sum()).expand(len(teachers[0]), -1)


def by_confidence(
    teachers: Sequence[Float[Tensor, "rows classes"]], weights: Sequence[float], *, sharpness: float = 1.0
) -> Float[Tensor, "rows teachers"]:
    """Weights of each row in proportion to the given ones and to exp(-sharpness · entropy) of each teacher's answer.

    Source: Du et al. 2020 (NeurIPS, "Agree to disagree") and Zhang et al. 2022, CA-MKD (arXiv 2201.00007), equation 5,
    weigh teachers by their cross-entropy with the labels; entropy needs none, so texts without labels count too.
    """
    answers = [F.log_softmax(widened(each), dim=-1) for each in teachers]
    entropies = torch.stack([-expected(each, each) for each in answers], dim=-1)
    given = torch.tensor(weights, device=entropies.device, dtype=entropies.dtype)
    return F.softmax(given.log() - sharpness * entropies, dim=-1)
