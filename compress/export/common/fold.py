"""Folding of element-wise norms into the weights around them, before a model is quantized or exported."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.checkpoint.custom_models import has_custom_norms
from distill.checkpoint.custom_models.modeling_custom_norms import TokenBatchNorm
from distill.checkpoint.norm_kinds import BATCHNORM, ELEMENTWISE, NONORM
from distill.slicing.custom_norms import build_with_norms
from distill.slicing.stream import absorb_scale_and_shift, find_residual_segments

IDENTITY = "identity"
SPREAD = 64.0  # largest ratio of two features' factors that is left in the stream: int8 has 127 steps for all of them


@torch.no_grad()
def fold_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model with its `nonorm` and `batchnorm` folded into weights; other models unchanged.

    In eval mode both are y = a * x + b for each feature. The next linear layers take a and b into their weights and
    biases. The residual sum reads y too: instead of multiplying it, the stream is stored divided by the product of all
    a so far, and the layers that write to it are divided by that product; so nothing is left of a norm. This is exact
    up to rounding. What remains is one scale and shift at the end of the stream, because heads differ in what they
    read, and one wherever the factors of two features would differ by more than `SPREAD` or one is 0, because a token's
    features share a grid when they are rounded. In MobileBERT, whose blocks have two streams, each norm becomes the
    scale and shift of its stock class.

    Args:
        model: A model in eval mode; it isn't modified.
    """
    kinds = set(model.config.norms.values()) if has_custom_norms(model) else set()
    if not kinds & set(ELEMENTWISE) or IDENTITY in kinds:
        return model
    folded = copy.deepcopy(model).double()
    body, norms, lines = folded.base_model, dict(model.config.norms), dict[str, tuple[Tensor, Tensor]]()
    segments = find_residual_segments(folded)
    if segments:
        for name, scale, shift in _fold_stream(folded):
            lines[name] = scale, shift
        norms = {name: NONORM if name in lines else IDENTITY for name in norms}
    else:
        for name, kind in norms.items():
            if kind == BATCHNORM:
                norms[name], lines[name] = NONORM, read_scale_and_shift(body.get_submodule(name))
    prefix = f"{folded.base_model_prefix}." if body is not folded else ""
    weights = folded.state_dict()
    for name, line in lines.items():
        weights |= {f"{prefix}{name}.{part}": tensor for part, tensor in zip(("weight", "bias"), line, strict=True)}
    return build_with_norms(model, norms, weights)


def _fold_stream(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Changes the weights around the norms of a stream in place.

    Yields:
        (name, scale, shift) of each norm that remains, of what is in the stream.
    """
    body: nn.Module = model.base_model
    *segments, last = find_residual_segments(model)
    factor: Tensor | None = None  # of the stream: the model's values are `factor` times those that are stored
    for segment in segments:
        if not segment.norm:
            continue
        scale, shift = read_scale_and_shift(body.get_submodule(segment.norm))
        factor = scale if factor is None else scale * factor
        if factor.abs().max() > SPREAD * factor.abs().min():
            yield segment.norm, factor, shift
            factor = None
            continue
        absorb_scale_and_shift(body, segment, factor, shift)
        factor = factor if segment.writer else None
    scale, shift = read_scale_and_shift(body.get_submodule(last.norm))
    yield last.norm, scale if factor is None else scale * factor, shift


def read_scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns the scale and the shift [width] that an element-wise norm has in eval mode."""
    weight, bias = norm.weight, norm.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    if not isinstance(norm, TokenBatchNorm):
        return weight, bias
    mean, variance = norm.running_mean, norm.running_var
    assert isinstance(mean, Tensor)
    assert isinstance(variance, Tensor)
    scale = weight * torch.rsqrt(variance + norm.eps)
    return scale, bias - mean * scale
