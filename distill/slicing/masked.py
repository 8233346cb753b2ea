"""The masked model: the full-size reference that a pruned model must equal."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_stack
from distill.slicing.shape import Shape, check_shape
from distill.slicing.tracing.axes import Axis


@torch.no_grad()
def mask_model(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> PreTrainedModel:
    """Returns a full-size copy in which removed units and layers have no effect: the reference for a pruned model.

    Removed units are zero in every weight, norms use the kept hidden coordinates only, and dropped layers return their
    input. Removed tokens aren't masked, since their ids don't occur.

    Raises:
        InputError: The shape doesn't fit the model.
    """
    check_shape(model, axes, shape)
    copied = copy.deepcopy(model)
    weights = dict(copied.named_parameters(remove_duplicate=False))
    for axis in (axis for axis in axes if axis.name in shape.kept and axis.kind != "vocabulary"):
        if axis.kind == "hidden":
            for path in sorted({slot.parameter.rpartition(".")[0] for slot in axis.slots if slot.role == "scale"}):
                narrow_norm(copied.get_submodule(path), shape.kept[axis.name].to(model.device))
        removed = torch.ones(axis.units, dtype=torch.bool)
        removed[shape.kept[axis.name].cpu()] = False
        for slot in axis.slots:
            places = axis.coordinates(slot, removed.nonzero()[:, 0]).to(model.device)
            weights[slot.parameter].index_fill_(slot.dim, places, 0.0)
    layers = list(copied.get_submodule(find_layer_stack(copied)).children())
    for i in set(range(len(layers))) - set(shape.layers):
        bypass_layer(layers[i])
    return copied


def bypass_layer(layer: nn.Module) -> None:
    """Makes a layer return its input hidden states, along with its other outputs."""
    inner = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = inner(hidden_states, *args, **kwargs)
        return (hidden_states, *outputs[1:]) if isinstance(outputs, tuple) else hidden_states

    layer.forward = forward


def narrow_norm(norm: nn.Module, kept: Tensor) -> None:
    """Makes a norm use only the coordinates `kept` of its input and return 0 at the others."""
    small = copy.deepcopy(norm)
    for name, weight in small.named_parameters():
        setattr(small, name, nn.Parameter(weight[kept]))
    if isinstance(small, nn.LayerNorm | nn.RMSNorm):
        small.normalized_shape = (len(kept),)

    def forward(hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states).index_copy(-1, kept, small(hidden_states[..., kept]))

    norm.forward = forward
