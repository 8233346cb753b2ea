"""Mixtures of several teachers' distributions, weighted by constants or by each teacher's confidence in a row."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from distill.losses.logits import row_expectation, upcast


def mix_logits(
    teachers: Sequence[Float[Tensor, "rows classes"]],
    weights: Float[Tensor, "rows teachers"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "rows classes"]:
    """Returns logits whose softmax at the temperature is Σ wᵢ softmax(teacherᵢ / T), to be used as a single teacher's.

    Source: You et al. 2017 (doi 10.1145/3097983.3098135), section 3.2, with weights per row.
    """
    softened = torch.stack([F.log_softmax(upcast(logits) / temperature, dim=-1) for logits in teachers], dim=-1)
    return (softened + upcast(weights).log()[:, None]).logsumexp(-1) * temperature


def constant_weights(
    teachers: Sequence[Float[Tensor, "rows classes"]], weights: Sequence[float]
) -> Float[Tensor, "rows teachers"]:
    """Returns the same weights for every row, normalized to sum to 1."""
    constants = torch.tensor(weights, device=teachers[0].device)
    return (constants / constants.sum()).expand(len(teachers[0]), -1)


def confidence_weights(
    teachers: Sequence[Float[Tensor, "rows classes"]], weights: Sequence[float], *, sharpness: float = 1.0
) -> Float[Tensor, "rows teachers"]:
    """Returns each row's weights, proportional to `weights` and to exp(-sharpness · entropy) of each teacher.

    Source: Du et al. 2020 (NeurIPS, "Agree to disagree") and Zhang et al. 2022, CA-MKD (arXiv 2201.00007), equation 5,
    weigh teachers by their cross-entropy with the labels; entropy needs no labels, so unlabelled texts work too.
    """
    log_probs = [F.log_softmax(upcast(logits), dim=-1) for logits in teachers]
    entropies = torch.stack([-row_expectation(each, each) for each in log_probs], dim=-1)
    constants = torch.tensor(weights, device=entropies.device, dtype=entropies.dtype)
    return F.softmax(constants.log() - sharpness * entropies, dim=-1)
