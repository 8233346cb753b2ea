"""Builds a smaller model of the teacher's own class from the teacher's weights."""

import copy
import math
import re

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from distill.errors import InputError
from distill.student.family import Family, family_of
from distill.student.spec import Sizes, resolve

Weights = dict[str, Tensor]


def build_student(teacher: PreTrainedModel, spec: str) -> PreTrainedModel:
    """A model of the teacher's class with the sizes of `spec`, its weights the selected part of the teacher's.

    Layers are those the spec names; of each width the coordinates of the largest weights are kept, the same in every
    weight they run through. With the teacher's own sizes the student is the teacher.

    Raises:
        InputError: An unknown family, or sizes that can't be.

    Source: layers as in Sanh et al. 2019 (arXiv 1910.01108, section 3); widths as in Xu et al. 2024, Weight Selection
    (arXiv 2311.18823), but by the norm of all weights that a coordinate runs through instead of evenly.
    """
    family = family_of(teacher.config)
    old = family.sizes(teacher.config)
    new = resolve(spec, old)
    weights = rename_layers({k: v.detach().clone() for k, v in teacher.state_dict().items()}, family, new)
    kept = kept_coordinates(weights, family, old, new)
    sliced = {name: slice_weight(name, weight, family, kept) for name, weight in weights.items()}
    rescale_queries(sliced, family, old, new)
    student = type(teacher)(student_config(teacher.config, spec))
    student.load_state_dict(sliced)
    return student.eval()  # as from_pretrained hands models over


def student_config(teacher: PretrainedConfig, spec: str) -> PretrainedConfig:
    """The config of the student that `spec` asks for."""
    if spec == "teacher":  # of any family, for nothing is cut
        return copy.deepcopy(teacher)
    family = family_of(teacher)
    old = family.sizes(teacher)
    config = copy.deepcopy(teacher)
    for name, value in family.config_changes(resolve(spec, old)).items():
        setattr(config, name, value)
    # ELECTRA projects its embeddings only where they are narrower than the layers.
    if getattr(config, "embedding_size", None) == old.hidden:
        config.embedding_size = config.hidden_size
    elif getattr(config, "embedding_size", None) == config.hidden_size:
        raise InputError(
            f"student hidden={config.hidden_size}: the teacher's embeddings have this width too, and then the stock "
            "class has no projection between embeddings and layers; take another width"
        )
    return config


def rename_layers(weights: Weights, family: Family, new: Sizes) -> Weights:
    """Keeps the chosen layers under their new numbers."""
    place = {old: i for i, old in enumerate(new.layers)}
    kept: Weights = {}
    for name, weight in weights.items():
        number = layer_number(name, family)
        if number is None:
            kept[name] = weight
        elif number in place:
            start, end = span(name, family)
            kept[f"{name[:start]}{place[number]}{name[end:]}"] = weight
    return kept


def layer_number(name: str, family: Family) -> int | None:
    found = re.search(family.layer, name)
    return int(found.group(1)) if found else None


def span(name: str, family: Family) -> tuple[int, int]:
    found = re.search(family.layer, name)
    assert found is not None
    return found.span(1)


Kept = dict[tuple[str, int | None], Tensor]


def kept_coordinates(weights: Weights, family: Family, old: Sizes, new: Sizes) -> Kept:
    """Numbers of the coordinates to keep: `hidden` for the whole model, the others for each layer."""
    norms: dict[tuple[str, int | None], Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            continue
        for axis, role in enumerate(family.roles(name, 2)):
            if role:
                key = (role, None if role == "hidden" else layer_number(name, family))
                squares = weight.double().pow(2).sum(1 - axis)
                norms[key] = norms[key] + squares if key in norms else squares
    kept: Kept = {("hidden", None): largest(norms["hidden", None], new.hidden)}
    for number in range(len(new.layers)):
        kept["ffn", number] = largest(norms["ffn", number], new.ffn)
        strength = norms["qk", number] + norms["vo", number]
        heads = largest(strength.reshape(old.heads, -1).sum(1), new.heads)
        for role in ("qk", "vo"):
            kept[role, number] = head_coordinates(norms[role, number].reshape(old.heads, -1), heads, new)
    return kept


def head_coordinates(norms: Tensor, heads: Tensor, new: Sizes) -> Tensor:
    """Numbers of the kept coordinates of the kept heads; norms [heads, head width]."""
    width, kept = norms.shape[1], new.hidden // new.heads
    return torch.cat([head * width + largest(norms[head], kept) for head in heads])


def largest(values: Tensor, count: int) -> Tensor:
    """Numbers of the `count` largest values, in rising order; ties go to the lower number."""
    return torch.sort(values, descending=True, stable=True).indices[:count].sort().values


def slice_weight(name: str, weight: Tensor, family: Family, kept: Kept) -> Tensor:
    if not weight.is_floating_point():
        return weight
    for axis, role in enumerate(family.roles(name, weight.dim())):
        if role:
            index = kept[role, None if role == "hidden" else layer_number(name, family)]
            if index[-1] >= weight.shape[axis]:
                raise InputError(f"weight {name!r}: axis {axis} of {weight.shape[axis]} isn't the model's {role} size")
            weight = weight.index_select(axis, index)
    return weight.contiguous()


def rescale_queries(weights: Weights, family: Family, old: Sizes, new: Sizes) -> None:
    """Attention divides by the root of the head width; narrower heads would sharpen it."""
    factor = math.sqrt((new.hidden / new.heads) / (old.hidden / old.heads))
    if factor == 1:
        return
    for name in weights:
        if re.search(r"attention\.(self\.query|q_lin)\.", name):
            weights[name] *= factor
