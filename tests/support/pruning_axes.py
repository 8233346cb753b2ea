"""Tiny models with their axes, and copies pruned along them as references for gates and scores."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from distill.checkpoint.layers import find_layer_stack
from distill.slicing import Axis, find_axes
from support.tiny_models import VOCABULARY, build_model, draw_weights

AXES: dict[str, list[Axis]] = {}  # found once for each family


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """Returns a Llama with 2 layers, width 32, 4 query and 2 key-value heads, and feed-forward width 48."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(vocab_size=len(VOCABULARY), pad_token_id=0, **(sizes | heads | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForCausalLM(config)
        draw_weights(model)
    return model.eval()


def tiny_model_with_axes(family: str) -> tuple[PreTrainedModel, list[Axis]]:
    """Returns a new tiny model, `llama` or one of tiny_models.MODELS, and its axes."""
    model = tiny_llama() if family == "llama" else build_model(family)
    if family not in AXES:
        AXES[family] = find_axes(model)
    return model, list(AXES[family])


def without_units(model: nn.Module, axes: list[Axis], kept_units: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy without the units that aren't kept; it can be called, but isn't a valid checkpoint."""
    smaller = copy.deepcopy(model)
    weights = dict(smaller.named_parameters(remove_duplicate=False))
    for axis in (axis for axis in axes if axis.name in kept_units):
        for slot in axis.slots:
            weight, coordinates = weights[slot.parameter], axis.coordinates(slot, kept_units[axis.name])
            weight.data = weight.data.index_select(slot.dim, coordinates)
    for module in smaller.modules():
        if isinstance(module, nn.LayerNorm):
            module.normalized_shape = tuple(module.weight.shape)
    return smaller


def without_layer(model: PreTrainedModel, number: int) -> PreTrainedModel:
    """Returns a copy without one layer."""
    smaller = copy.deepcopy(model)
    del smaller.get_submodule(find_layer_stack(model))[number]
    return smaller


def largest_gap(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference relative to the largest value of `b`."""
    return float((a - b).abs().max() / b.abs().max())
