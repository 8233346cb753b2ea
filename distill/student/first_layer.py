"""A layer that becomes the first where the first has no norm before its attention (ModernBERT), or is it no more."""

import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
NORM = "attn_norm"  # of every layer but the first
READER = "attn.Wqkv"
EMBEDDINGS = "embeddings"


def without_first_norm(weights: Weights, first: int, place: int | None, eps: float) -> Weights:
    """Weights of a student whose layers have their new numbers, as its class has them: no norm in the first alone.

    The norm of the layer that is the first now goes into the map that reads it: its scale and the subtraction of the
    mean exactly, the division by a token's deviation as one by the constant that comes nearest over the vocabulary,
    and its shift, where there is one, only where the map has a bias. What comes in was normalised by the embeddings, so
    deviations differ by their scale alone; where that is the same for every coordinate the student computes as with the
    norm. A layer that was the teacher's first, and is further up now, gets the norm that it had read, the embeddings'.

    Args:
        weights: By their names in the student.
        first: Number in the teacher of the student's first layer.
        place: Number in the student of the teacher's first layer; None where it is gone.
        eps: Of the norms.
    """
    if first == 0:
        return weights
    body = next(name for name in weights if name.endswith(f"{EMBEDDINGS}.norm.weight")).partition(EMBEDDINGS)[0]
    table, before, begun = f"{body}{EMBEDDINGS}.tok_embeddings.weight", f"{body}{EMBEDDINGS}.norm", f"{body}layers.0"
    found = {name: weight for name, weight in weights.items() if not name.startswith(f"{begun}.{NORM}.")}
    scale, shift = norm_of(weights, f"{begun}.{NORM}")
    reader, bias = f"{begun}.{READER}.weight", f"{begun}.{READER}.bias"
    if shift is not None and bias in found:
        found[bias] = found[bias] + found[reader] @ shift
    read = F.layer_norm(weights[table], scale.shape, *norm_of(weights, before), eps=eps)
    scaled = found[reader] * scale
    found[reader] = (scaled - scaled.mean(1, keepdim=True)) * nearest_scale(read.var(1, correction=0), eps)
    if place is not None:
        parts = {"weight", "bias"} if shift is not None else {"weight"}
        found |= {f"{body}layers.{place}.{NORM}.{part}": weights[f"{before}.{part}"].clone() for part in parts}
    return found


def norm_of(weights: Weights, name: str) -> tuple[Tensor, Tensor | None]:
    return weights[f"{name}.weight"], weights.get(f"{name}.bias")


def nearest_scale(variances: Tensor, eps: float) -> Tensor:
    """The c with the least sum of |c x - x / sqrt(v + eps)|² over vectors x of these variances v [vectors]."""
    return (variances * (variances + eps).rsqrt()).sum() / variances.sum()
