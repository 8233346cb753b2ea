"""A copy of a model without storage and with few layers, which is traced faster than the model itself."""

import copy
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from distill.checkpoint.custom_models.modeling_pruned import drop_layers
from distill.checkpoint.layers import select_layer_settings

EQUAL = 2  # layers kept of each kind; a single one could be confused with the modules around it


@dataclass(frozen=True)
class ReducedCopy:
    """A copy on the meta device with the first layers of each kind.

    Args:
        model: The copy.
        layers: Layer of the copy -> layers of the model that it represents.
    """

    model: PreTrainedModel
    layers: tuple[tuple[int, ...], ...]


def build_reduced_copy(model: PreTrainedModel, stack: str) -> ReducedCopy:
    """Returns a copy with the first two layers of each kind; the others are represented by the second one.

    Layers are of one kind if their weights have the same names and shapes and the config lists the same for them.
    """
    kinds = list_kinds(model, stack)
    seen: Counter[Hashable] = Counter()
    by_kind: dict[Hashable, list[list[int]]] = {}
    for number, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= EQUAL:
            by_kind.setdefault(kind, []).append([number])
        else:
            by_kind[kind][-1].append(number)
    groups = sorted(group for several in by_kind.values() for group in several)
    reduced = copy_without_storage(model)
    select_layer_settings(reduced.config, [group[0] for group in groups])
    drop_layers(reduced, stack, [group[0] for group in groups])
    return ReducedCopy(reduced, tuple(map(tuple, groups)))


def list_kinds(model: PreTrainedModel, stack: str) -> Sequence[Hashable]:
    """Returns what distinguishes each layer from others."""
    config, layers = model.config, list(model.get_submodule(stack).children())
    lists = [value for name, value in vars(config).items() if "layer" in name and isinstance(value, list)]
    lists = [entries for entries in lists if len(entries) == len(layers)]
    weights = [tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()) for layer in layers]
    return [(layer_weights, *(repr(entries[i]) for entries in lists)) for i, layer_weights in enumerate(weights)]


def copy_without_storage(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a deep copy whose parameters and buffers are on the meta device."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
