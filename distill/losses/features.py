"""Objectives on the layers' outputs: hidden states, attention, and relations within and between texts.

A mask is 0 on padding and 1 on a text's tokens; in a row with several texts it is the number of the text, from 1.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from distill.errors import InputError
from distill.losses.logits import kl, widened


def hidden_mse(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean squared difference over the positions where mask is 1 and over width.

    Source: Jiao et al. 2020, TinyBERT (arXiv 1909.10351), equation 8; padding is excluded.
    """
    squared = (widened(student) - widened(teacher)).pow(2).mean(-1)
    return masked_mean(squared, mask)


def hidden_cosine(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean of 1 - cos(student, teacher) over the positions where mask is 1.

    Source: Sanh et al. 2019, DistilBERT (arXiv 1910.01108), section 3.
    """
    return masked_mean(1 - F.cosine_similarity(widened(student), widened(teacher), dim=-1), mask)


def hidden_normalized_mse(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean over the positions where mask is 1 of ‖s/‖s‖ - t/‖t‖‖²: twice the cosine distance, from 0 to 4.

    Source: Sun et al. 2019, patient KD (arXiv 1908.09355), equation 7, for every position instead of the first alone.
    """
    own, taught = (F.normalize(widened(each), dim=-1) for each in (student, teacher))
    return masked_mean((own - taught).pow(2).sum(-1), mask)


def attention_mse(
    student: Float[Tensor, "batch heads length length"],
    teacher: Float[Tensor, "batch heads length length"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean squared difference of attention scores before the softmax, over heads and tokens, each with all of its text.

    Source: Jiao et al. 2020, TinyBERT (arXiv 1909.10351), equation 7; padding is excluded.
    """
    pairs = pairs_of(mask)
    squared = (widened(student) - widened(teacher)).pow(2).mean(1).masked_fill(~pairs, 0)
    return masked_mean(squared.sum(-1) / pairs.sum(-1).clamp(min=1), mask)


def attention_kl(
    student: Float[Tensor, "batch heads length length"],
    teacher: Float[Tensor, "batch heads length length"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean over heads and tokens of KL(softmax(teacher) ‖ softmax(student)), with each row over the text's own tokens.

    Source: Wang et al. 2020, MiniLM (arXiv 2002.10957), equation 4; from scores before the softmax.
    """
    others = (mask[:, :, None] != mask[:, None])[:, None]  # padding counts as a text: an empty row would give NaN
    p, q = (F.log_softmax(widened(each).masked_fill(others, -torch.inf), dim=-1) for each in (teacher, student))
    return masked_mean(kl(p, q).mean(1), mask)


def attention_scores(
    queries: Float[Tensor, "batch length width"], keys: Float[Tensor, "batch length _"], heads: int
) -> Float[Tensor, "batch heads length length"]:
    """Returns the products of every query and key in each head over the root of its width, the input of BERT's softmax.

    If several heads share a key, `keys` is narrower accordingly.
    """
    own = split_heads(queries, heads, "heads")
    others = split_heads(keys, keys.shape[-1] // own.shape[-1], "heads")
    others = others.repeat_interleave(heads // others.shape[1], 1)
    return own @ others.transpose(-1, -2) / own.shape[-1] ** 0.5


def relation_kl(
    student: Float[Tensor, "batch length _"],
    teacher: Float[Tensor, "batch length _"],
    mask: Int[Tensor, "batch length"],
    *,
    heads: int,
) -> Float[Tensor, ""]:
    """Mean over relation heads and tokens of KL between the softmax of scaled products of each token with all.

    `student` and `teacher` are queries, keys or values of a layer with all heads side by side, of any two widths that
    `heads` divides: they are split into relation heads again, so students may have other heads than the teacher.

    Raises:
        InputError: `heads` doesn't divide a width.

    Source: Wang et al. 2021, MiniLMv2 (arXiv 2012.15828), equations 3 to 5.
    """
    return attention_kl(relations(student, heads), relations(teacher, heads), mask)


def relations(values: Float[Tensor, "batch length width"], heads: int) -> Float[Tensor, "batch heads length length"]:
    """Returns the products of every two tokens in each relation head, over the root of its width."""
    own = split_heads(values, heads, "loss.relation_heads")
    return own @ own.transpose(-1, -2) / own.shape[-1] ** 0.5


def split_heads(
    values: Float[Tensor, "batch length width"], heads: int, name: str
) -> Float[Tensor, "batch heads length part"]:
    batch, length, width = values.shape
    if width % heads:
        raise InputError(
            f"{name} {heads}: expected a number that divides the width {width}: the heads of teacher and student would "
            "hold other parts of the vectors"
        )
    return widened(values).view(batch, length, heads, -1).transpose(1, 2)


def embedding_mse(student: Float[Tensor, "batch width"], teacher: Float[Tensor, "batch width"]) -> Float[Tensor, ""]:
    """Mean squared difference of the texts' vectors.

    Source: Reimers and Gurevych 2020 (arXiv 2004.09813), equation 1.
    """
    return F.mse_loss(widened(student), widened(teacher))


def embedding_cosine(student: Float[Tensor, "batch width"], teacher: Float[Tensor, "batch width"]) -> Float[Tensor, ""]:
    """Mean of 1 - cos(student, teacher) over texts."""
    return (1 - F.cosine_similarity(widened(student), widened(teacher), dim=-1)).mean()


def similarity_mse(student: Float[Tensor, "batch _"], teacher: Float[Tensor, "batch _"]) -> Float[Tensor, ""]:
    """Mean squared difference of the cosines of every two different texts of the batch; the widths may differ.

    Source: Tung and Mori 2019 (arXiv 1907.09682), section 3, on vectors of texts; without the diagonal, which is 1 in
    both. 0 for a single text.
    """
    own, taught = (cosines(each) for each in (student, teacher))
    count = len(own)
    return (own - taught).square().sum() / max(1, count * (count - 1))


def similarity_kl(
    student: Float[Tensor, "batch _"], teacher: Float[Tensor, "batch _"], *, temperature: float = 0.05
) -> Float[Tensor, ""]:
    """Mean over texts of KL between the softmax of the cosines with all other texts, divided by the temperature.

    Source: Fang et al. 2021, SEED (arXiv 2101.04731), equation 4, within the batch instead of a queue. 0 for fewer than
    three texts: with a single other text the softmax is constant.
    """
    itself = torch.eye(len(student), dtype=torch.bool, device=student.device)
    own, taught = ((cosines(each) / temperature).masked_fill(itself, -torch.inf) for each in (student, teacher))
    if len(own) < 2:
        return own.masked_fill(itself, 0).sum()
    return kl(F.log_softmax(taught, dim=-1), F.log_softmax(own, dim=-1)).mean()


def cosines(vectors: Float[Tensor, "batch width"]) -> Float[Tensor, "batch batch"]:
    unit = F.normalize(widened(vectors), dim=-1)
    return unit @ unit.T


def pairs_of(mask: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch length length"]:
    """Returns whether each two positions are tokens of the same text."""
    return (mask[:, :, None] == mask[:, None]) & (mask[:, None] != 0)


def masked_mean(values: Float[Tensor, "*shape"], mask: Int[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Returns the mean over positions where mask isn't 0, whatever the values elsewhere."""
    return values.masked_fill(mask == 0, 0).sum() / (mask != 0).sum().clamp(min=1)


ATTENTIONS = {"mse": attention_mse, "kl": attention_kl}
DISTANCES = {"mse": hidden_mse, "cosine": hidden_cosine, "normalized_mse": hidden_normalized_mse}
EMBEDDINGS = {"cosine": embedding_cosine, "mse": embedding_mse}
SIMILARITIES = {"mse": similarity_mse, "kl": similarity_kl}
