"""Weight conversion for a changed first layer in a family whose first layer has no attention norm (ModernBERT)."""

import torch.nn.functional as F
from torch import Tensor

from distill.slicing.weights import Weights

NORM = "attn_norm"  # present in every layer except the first
READER = "attn.Wqkv"
EMBEDDINGS = "embeddings"


def fold_first_attention_norm(weights: Weights, first: int, index: int | None, eps: float) -> Weights:
    """Returns the weights of a student with renumbered layers, whose first layer has no attention norm.

    The norm of the new first layer is folded into the projection after it: its scale and the subtraction of the mean
    exactly, the division by a token's standard deviation as a constant factor with the least error over the
    vocabulary, and its shift, if any, only if the projection has a bias. The layer's inputs are already normalized by
    the embeddings, so the deviations differ only through the scale of that norm; if the scale is the same for every
    coordinate, the student computes the same as with the norm. The teacher's first layer, if moved to a later place,
    gets a copy of the embeddings' norm, which normalized its inputs before.

    Args:
        weights: Weights by their names in the student.
        first: Number in the teacher of the student's first layer.
        index: Number in the student of the teacher's first layer; None if it was removed.
        eps: Epsilon of the norms.
    """
    if first == 0:
        return weights
    body = next(name for name in weights if name.endswith(f"{EMBEDDINGS}.norm.weight")).partition(EMBEDDINGS)[0]
    table, before, begun = f"{body}{EMBEDDINGS}.tok_embeddings.weight", f"{body}{EMBEDDINGS}.norm", f"{body}layers.0"
    folded = {name: weight for name, weight in weights.items() if not name.startswith(f"{begun}.{NORM}.")}
    scale, shift = read_norm_weights(weights, f"{begun}.{NORM}")
    reader, bias = f"{begun}.{READER}.weight", f"{begun}.{READER}.bias"
    if shift is not None and bias in folded:
        folded[bias] = folded[bias] + folded[reader] @ shift
    read = F.layer_norm(weights[table], scale.shape, *read_norm_weights(weights, before), eps=eps)
    scaled = folded[reader] * scale
    folded[reader] = (scaled - scaled.mean(1, keepdim=True)) * fit_norm_scale(read.var(1, correction=0), eps)
    if index is not None:
        parts = {"weight", "bias"} if shift is not None else {"weight"}
        folded |= {f"{body}layers.{index}.{NORM}.{part}": weights[f"{before}.{part}"].clone() for part in parts}
    return folded


def read_norm_weights(weights: Weights, name: str) -> tuple[Tensor, Tensor | None]:
    """Returns the scale and shift of a norm; no shift for an RMS norm."""
    return weights[f"{name}.weight"], weights.get(f"{name}.bias")


def fit_norm_scale(variances: Tensor, eps: float) -> Tensor:
    """Returns the c that minimises the sum of |c x - x / sqrt(v + eps)|² over vectors x with variances v [vectors]."""
    return (variances * (variances + eps).rsqrt()).sum() / variances.sum()
