"""Mixtures of several teachers' distributions, weighted by constants or by each teacher's confidence in a row."""

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
    """Returns logits whose softmax at the temperature is Σ wᵢ softmax(teacherᵢ / T), to be used as a single teacher's.

    Source: You et al. 2017 (doi 10.1145/3097983.3098135), section 3.2, with weights per row.
    """
    softened = torch.stack([F.log_softmax(widened(each) / temperature, dim=-1) for each in teachers], dim=-1)
    return (softened + widened(weights).log()[:, None]).logsumexp(-1) * temperature


def by_weight(
    teachers: Sequence[Float[Tensor, "rows classes"]], weights: Sequence[float]
) -> Float[Tensor, "rows teachers"]:
    """Returns the same weights for every row, normalized to sum to 1."""
    given = torch.tensor(weights, device=teachers[0].device)
    return (given / given.sum()).expand(len(teachers[0]), -1)


def by_confidence(
    teachers: Sequence[Float[Tensor, "rows classes"]], weights: Sequence[float], *, sharpness: float = 1.0
) -> Float[Tensor, "rows teachers"]:
    """Returns weights of each row proportional to the given ones and to exp(-sharpness · entropy) of each teacher.

    Source: Du et al. 2020 (NeurIPS, "Agree to disagree") and Zhang et al. 2022, CA-MKD (arXiv 2201.00007), equation 5,
    weigh teachers by their cross-entropy with the labels; entropy needs no labels, so unlabelled texts work too.
    """
    answers = [F.log_softmax(widened(each), dim=-1) for each in teachers]
    entropies = torch.stack([-expected(each, each) for each in answers], dim=-1)
    given = torch.tensor(weights, device=entropies.device, dtype=entropies.dtype)
    return F.softmax(given.log() - sharpness * entropies, dim=-1)
