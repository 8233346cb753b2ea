"""Objectives on the layers' outputs: hidden states, attention, and relations within and between texts.

A mask is 0 at padding and 1 at a text's tokens; in a row packed with several texts it is the text's number, from 1.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from distill.errors import InputError
from distill.losses.logits import row_kl, upcast


def hidden_mse(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean squared difference over tokens and over the width.

    Source: Jiao et al. 2020, TinyBERT (arXiv 1909.10351), equation 8; padding is excluded.
    """
    squared = (upcast(student) - upcast(teacher)).pow(2).mean(-1)
    return _masked_mean(squared, mask)


def hidden_cosine(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean of 1 - cos(student, teacher) over tokens.

    Source: Sanh et al. 2019, DistilBERT (arXiv 1910.01108), section 3.
    """
    return _masked_mean(1 - F.cosine_similarity(upcast(student), upcast(teacher), dim=-1), mask)


def hidden_normalized_mse(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean over tokens of ‖s/‖s‖ - t/‖t‖‖²: twice the cosine distance, from 0 to 4.

    Source: Sun et al. 2019, patient KD (arXiv 1908.09355), equation 7, for every position instead of the first alone.
    """
    student, teacher = (F.normalize(upcast(states), dim=-1) for states in (student, teacher))
    return _masked_mean((student - teacher).pow(2).sum(-1), mask)


def attention_mse(
    student: Float[Tensor, "batch heads length length"],
    teacher: Float[Tensor, "batch heads length length"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean squared difference of attention scores before the softmax, over heads and over pairs of tokens of a text.

    Source: Jiao et al. 2020, TinyBERT (arXiv 1909.10351), equation 7; padding is excluded.
    """
    visible = same_text_pairs(mask)
    squared = (upcast(student) - upcast(teacher)).pow(2).mean(1).masked_fill(~visible, 0)
    return _masked_mean(squared.sum(-1) / visible.sum(-1).clamp(min=1), mask)


def attention_kl(
    student: Float[Tensor, "batch heads length length"],
    teacher: Float[Tensor, "batch heads length length"],
    mask: Int[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Mean over heads and tokens of KL(softmax(teacher) ‖ softmax(student)), each softmax over the tokens of one text.

    Source: Wang et al. 2020, MiniLM (arXiv 2002.10957), equation 4; from scores before the softmax.
    """
    others = (mask[:, :, None] != mask[:, None])[:, None]  # padding counts as a text: an empty row would give NaN
    p, q = (F.log_softmax(upcast(scores).masked_fill(others, -torch.inf), dim=-1) for scores in (teacher, student))
    return _masked_mean(row_kl(p, q).mean(1), mask)


def attention_scores(
    queries: Float[Tensor, "batch length width"], keys: Float[Tensor, "batch length _"], heads: int
) -> Float[Tensor, "batch heads length length"]:
    """Returns the scaled products of every query and key in each head, the input of the softmax in BERT.

    If several heads share a key (grouped-query attention), `keys` is narrower accordingly.

    Raises:
        InputError: `heads` doesn't divide a width.
    """
    split_queries = _split_heads(queries, heads, "heads")
    split_keys = _split_heads(keys, keys.shape[-1] // split_queries.shape[-1], "heads")
    split_keys = split_keys.repeat_interleave(heads // split_keys.shape[1], 1)
    return _scaled_products(split_queries, split_keys)


def relation_kl(
    student: Float[Tensor, "batch length _"],
    teacher: Float[Tensor, "batch length _"],
    mask: Int[Tensor, "batch length"],
    *,
    heads: int,
) -> Float[Tensor, ""]:
    """Mean over relation heads and tokens of KL between the softmax of each token's scaled products with all tokens.

    `student` and `teacher` are queries, keys or values of a layer with all heads side by side, of any two widths that
    `heads` divides: they are split into relation heads again, so students may have other heads than the teacher.

    Raises:
        InputError: `heads` doesn't divide a width.

    Source: Wang et al. 2021, MiniLMv2 (arXiv 2012.15828), equations 3 to 5.
    """
    return attention_kl(relation_scores(student, heads), relation_scores(teacher, heads), mask)


def relation_scores(
    values: Float[Tensor, "batch length width"], heads: int
) -> Float[Tensor, "batch heads length length"]:
    """Returns the scaled products of every two tokens in each relation head.

    Raises:
        InputError: `heads` doesn't divide the width.
    """
    split = _split_heads(values, heads, "loss.relation_heads")
    return _scaled_products(split, split)


def _scaled_products(
    queries: Float[Tensor, "batch heads length part"], keys: Float[Tensor, "batch heads length part"]
) -> Float[Tensor, "batch heads length length"]:
    products: Tensor = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    return products


def _split_heads(
    values: Float[Tensor, "batch length width"], heads: int, name: str
) -> Float[Tensor, "batch heads length part"]:
    batch, length, width = values.shape
    if width % heads:
        raise InputError(
            f"{name}: expected a divisor of the width {width}, found {heads}: the heads of teacher and student would "
            "contain different parts of the vectors"
        )
    return upcast(values).view(batch, length, heads, -1).transpose(1, 2)


def embedding_mse(student: Float[Tensor, "batch width"], teacher: Float[Tensor, "batch width"]) -> Float[Tensor, ""]:
    """Mean squared difference of the texts' vectors.

    Source: Reimers and Gurevych 2020 (arXiv 2004.09813), equation 1.
    """
    return F.mse_loss(upcast(student), upcast(teacher))


def embedding_cosine(student: Float[Tensor, "batch width"], teacher: Float[Tensor, "batch width"]) -> Float[Tensor, ""]:
    """Mean of 1 - cos(student, teacher) over texts."""
    return (1 - F.cosine_similarity(upcast(student), upcast(teacher), dim=-1)).mean()


def similarity_mse(student: Float[Tensor, "batch _"], teacher: Float[Tensor, "batch _"]) -> Float[Tensor, ""]:
    """Mean squared difference of the cosines of every two different texts of the batch; the widths may differ.

    Source: Tung and Mori 2019 (arXiv 1907.09682), section 3, on vectors of texts; without the diagonal, which is 1 in
    both. 0 for a single text.
    """
    count = len(student)
    difference = pairwise_cosines(student) - pairwise_cosines(teacher)
    return difference.square().sum() / max(1, count * (count - 1))


def similarity_kl(
    student: Float[Tensor, "batch _"], teacher: Float[Tensor, "batch _"], *, temperature: float = 0.05
) -> Float[Tensor, ""]:
    """Mean over texts of KL between the softmax of cosine / temperature with all other texts.

    Source: Fang et al. 2021, SEED (arXiv 2101.04731), equation 4, within the batch instead of a queue. 0 for fewer than
    three texts: with a single other text the softmax is constant.
    """
    diagonal = torch.eye(len(student), dtype=torch.bool, device=student.device)
    q, p = ((pairwise_cosines(each) / temperature).masked_fill(diagonal, -torch.inf) for each in (student, teacher))
    if len(student) < 2:
        return q.masked_fill(diagonal, 0).sum()
    return row_kl(F.log_softmax(p, dim=-1), F.log_softmax(q, dim=-1)).mean()


def pairwise_cosines(vectors: Float[Tensor, "batch width"]) -> Float[Tensor, "batch batch"]:
    """Returns the cosine of every two vectors, in at least float32."""
    unit = F.normalize(upcast(vectors), dim=-1)
    return unit @ unit.T


def same_text_pairs(mask: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch length length"]:
    """Returns whether each two positions are tokens of the same text."""
    return (mask[:, :, None] == mask[:, None]) & (mask[:, None] != 0)


def _masked_mean(values: Float[Tensor, "*shape"], mask: Int[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Returns the mean over positions where mask isn't 0; values elsewhere are ignored, even NaN."""
    return values.masked_fill(mask == 0, 0).sum() / (mask != 0).sum().clamp(min=1)


ATTENTION_DISTANCES = {"mse": attention_mse, "kl": attention_kl}
HIDDEN_DISTANCES = {"mse": hidden_mse, "cosine": hidden_cosine, "normalized_mse": hidden_normalized_mse}
EMBEDDING_DISTANCES = {"cosine": embedding_cosine, "mse": embedding_mse}
SIMILARITY_DISTANCES = {"mse": similarity_mse, "kl": similarity_kl}
