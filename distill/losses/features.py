"""Objectives on hidden states."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def hidden_mse(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean squared difference over the positions where mask is 1 and over width.

    Source: Jiao et al. 2020, TinyBERT (arXiv 1909.10351), equation 8; padding is left out.
    """
    squared = (student.float() - teacher.float()).pow(2).mean(-1)
    return masked_mean(squared, mask)


def hidden_cosine(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean of 1 - cos(student, teacher) over the positions where mask is 1.

    Source: Sanh et al. 2019, DistilBERT (arXiv 1910.01108), section 3.
    """
    return masked_mean(1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1), mask)


def masked_mean(values: Float[Tensor, "batch length"], mask: Int[Tensor, "batch length"]) -> Float[Tensor, ""]:
    return (values * mask).sum() / mask.sum().clamp(min=1)


DISTANCES = {"mse": hidden_mse, "cosine": hidden_cosine}
