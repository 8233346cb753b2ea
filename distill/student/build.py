"""Construction of a smaller model of the teacher's own class from the teacher's weights."""

import copy
import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from distill.errors import InputError
from distill.student.bottleneck import bottleneck_config, build_bottlenecks
from distill.student.embeddings import factorised
from distill.student.family import FAMILIES, Family, Role, family_of
from distill.student.first_layer import without_first_norm
from distill.student.spec import Sizes, parse_spec, resolve

Weights = dict[str, Tensor]


def build_student(teacher: PreTrainedModel, spec: str, seed: int = 0) -> PreTrainedModel:
    """Builds a model of the teacher's class with the sizes of `spec` from a selected part of the teacher's weights.

    The layers are those of the spec; of each width the coordinates with the largest weights are kept, the same ones in
    every weight that uses them. With the teacher's own sizes the student equals the teacher. The weights of a `fresh`
    spec are drawn at random from `seed`, as are the blocks of a bottleneck student, see `build_bottlenecks`. Where the
    stock class treats a layer according to its position, the weights compensate for a changed position; for ModernBERT
    only approximately, see `without_first_norm`.

    Raises:
        InputError: The family is not supported, or the sizes are not possible.

    Source: layers as in Sanh et al. 2019 (arXiv 1910.01108, section 3); widths as in Xu et al. 2024, Weight Selection
    (arXiv 2311.18823), but by the norm of all weights that a coordinate runs through instead of evenly.
    """
    given = parse_spec(spec)
    if given.is_blocks:
        student = build_bottlenecks(teacher, given, seed)
    else:
        student = build_sliced(teacher, spec, seed, fresh=given.fresh)
    if getattr(teacher, "generation_config", None) is not None:
        student.generation_config = copy.deepcopy(teacher.generation_config)  # contains the end tokens
    return student.eval()  # as from_pretrained returns models


def build_sliced(teacher: PreTrainedModel, spec: str, seed: int, *, fresh: bool) -> PreTrainedModel:
    """Builds a student of the teacher's own class."""
    config = student_config(teacher.config, spec)
    if fresh:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return type(teacher)(config)
    student = type(teacher)(config)
    student.load_state_dict(sliced_weights(teacher, spec))
    return student


def sliced_weights(teacher: PreTrainedModel, spec: str) -> Weights:
    family = family_of(teacher.config)
    old = family.sizes(teacher.config)
    new = resolve(spec, old)
    weights = rename_layers({k: v.detach().clone() for k, v in teacher.state_dict().items()}, family, new)
    if family.bare_first:
        place = new.layers.index(0) if 0 in new.layers else None
        weights = without_first_norm(weights, new.layers[0], place, teacher.config.norm_eps)
    kept = kept_coordinates(weights, family, old, new)
    lengths = axis_lengths(old)
    cut = {name: slice_weight(name, weight, family, kept, lengths) for name, weight in weights.items()}
    numbered = getattr(teacher.config, "scale_attn_by_inverse_layer_idx", False)
    sharpen_queries(cut, family, old, new, numbered=numbered)
    return factorised(cut, family.projects, new.embeddings) if new.embeddings else cut


def student_config(teacher: PretrainedConfig, spec: str) -> PretrainedConfig:
    """Returns the config of the student that `spec` requests.

    Raises:
        InputError: The family is not supported, or the sizes are not possible.
    """
    if spec == "teacher":  # works for any family, since nothing is removed
        return copy.deepcopy(teacher)
    given = parse_spec(spec)
    if given.is_blocks:
        return bottleneck_config(teacher, given)
    family = family_of(teacher)
    old = family.sizes(teacher)
    new = resolve(spec, old)
    if family.fills and new.heads != old.heads:
        raise InputError(f"student heads={new.heads}: expected the teacher's {old.heads}: they fill a width that stays")
    config = copy.deepcopy(teacher)
    for name, value in family.config_changes(teacher, new).items():
        setattr(config, name, value)
    if new.embeddings:
        check_embeddings(new, family, teacher.model_type)
        config.embedding_size = new.embeddings
    if new.embeddings or family.fills:  # these classes project embeddings of any width
        return config
    # ELECTRA projects its embeddings only where they are narrower than the layers.
    if getattr(config, "embedding_size", None) == old.hidden:
        config.embedding_size = config.hidden_size
    elif getattr(config, "embedding_size", None) == config.hidden_size:
        raise InputError(
            f"student hidden={config.hidden_size}: the teacher's embeddings have this width too, and then the stock "
            "class has no projection between embeddings and layers; take another width"
        )
    return config


def check_embeddings(new: Sizes, family: Family, name: str) -> None:
    """Checks that the student's embeddings can have their own width.

    Raises:
        InputError: The family has no projection from embeddings to layers, or the embeddings are not narrower than the
            layers.
    """
    if not family.projects:
        having = ", ".join(each for each, known in FAMILIES.items() if known.projects)
        raise InputError(
            f"student embeddings={new.embeddings}: the stock class of a {name!r} has no map between embeddings and "
            f"layers; {having} and the bottleneck presets have one; --prune.embedding_rank writes its own class"
        )
    if new.embeddings >= new.hidden:
        raise InputError(
            f"student embeddings={new.embeddings}: expected less than hidden, {new.hidden}: a table as wide as the "
            "layers needs no map, and there would be more weights than before"
        )


def rename_layers(weights: Weights, family: Family, new: Sizes) -> Weights:
    """Returns the weights of the selected layers under their new numbers, and all weights outside layers."""
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
Lengths = dict[str, int]


def axis_lengths(sizes: Sizes) -> Lengths:
    queries, keys = sizes.heads * sizes.head_width, sizes.groups * sizes.head_width
    return {"hidden": sizes.hidden, "q": queries, "k": keys, "v": keys, "o": queries, "ffn": sizes.ffn}


def parts_of(role: Role, lengths: Lengths) -> list[tuple[str, int, int]]:
    """Returns (role, start, end) of every part of an axis; empty if the axis is not sliced."""
    roles = (role,) if isinstance(role, str) else role or ()
    parts, start = [], 0
    for each in roles:
        parts.append((each, start, start + lengths[each]))
        start += lengths[each]
    return parts


def kept_coordinates(weights: Weights, family: Family, old: Sizes, new: Sizes) -> Kept:
    """Returns the indices of the coordinates to keep: `hidden` for the whole model, the others for each layer."""
    norms = squared_norms(weights, family, axis_lengths(old))
    kept: Kept = {("hidden", None): largest(norms["hidden", None], new.hidden)}
    for number in range(len(new.layers)):
        kept["ffn", number] = largest(norms["ffn", number], new.ffn)
        if ("q", number) not in norms:  # the heads of this family are fixed
            continue
        own = {role: norms[role, number] for role in ("q", "k", "v", "o")}
        kept |= {(role, number): index for role, index in head_coordinates(own, old, new).items()}
    return kept


def squared_norms(weights: Weights, family: Family, lengths: Lengths) -> Kept:
    """Returns, for each coordinate, the sum of squares of all matrix entries that belong to it."""
    norms: Kept = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            continue
        for axis, axis_role in enumerate(family.roles(name, 2)):
            squares = weight.double().pow(2).sum(1 - axis)
            for role, start, end in parts_of(axis_role, lengths):
                if end > len(squares):
                    raise InputError(f"weight {name!r}: axis {axis} of {len(squares)} isn't the model's {role} size")
                key = (role, None if role == "hidden" else layer_number(name, family))
                norms[key] = norms[key] + squares[start:end] if key in norms else squares[start:end]
    return norms


def head_coordinates(norms: dict[str, Tensor], old: Sizes, new: Sizes) -> dict[str, Tensor]:
    """Returns the kept coordinates by role: those of the groups with the largest norms, within each group of its heads
    with the largest norms, and within these the largest ones of queries and keys, and of values and outputs, together.
    """
    each, width = old.heads // old.groups, old.head_width
    q, o = (norms[role].reshape(old.groups, each, width) for role in ("q", "o"))
    k, v = (norms[role].reshape(old.groups, width) for role in ("k", "v"))
    strength = (q + o).sum((1, 2)) + (k + v).sum(1)
    found: dict[str, list[Tensor]] = {role: [] for role in norms}
    for group in largest(strength, new.groups).tolist():
        heads = largest((q + o)[group].sum(1), new.heads // new.groups)
        qk = largest(q[group, heads].sum(0) + k[group], new.head_width)
        vo = largest(o[group, heads].sum(0) + v[group], new.head_width)
        starts = (group * each + heads)[:, None] * width
        found["q"].append((starts + qk).flatten())
        found["o"].append((starts + vo).flatten())
        found["k"].append(group * width + qk)
        found["v"].append(group * width + vo)
    return {role: torch.cat(index) for role, index in found.items()}


def largest(values: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` largest values in ascending order; ties go to the lower index."""
    return torch.sort(values, descending=True, stable=True).indices[:count].sort().values


def slice_weight(name: str, weight: Tensor, family: Family, kept: Kept, lengths: Lengths) -> Tensor:
    if not weight.is_floating_point():
        return weight
    for axis, role in enumerate(family.roles(name, weight.dim())):
        parts = parts_of(role, lengths)
        if not parts:
            continue
        if parts[-1][2] != weight.shape[axis]:
            raise InputError(f"weight {name!r}: axis {axis} of {weight.shape[axis]} isn't the model's {role} size")
        weight = weight.index_select(axis, joined_index(parts, kept, layer_number(name, family)))
    return weight.contiguous()


def joined_index(parts: Sequence[tuple[str, int, int]], kept: Kept, layer: int | None) -> Tensor:
    return torch.cat([start + kept[role, None if role == "hidden" else layer] for role, start, _ in parts])


def sharpen_queries(weights: Weights, family: Family, old: Sizes, new: Sizes, *, numbered: bool = False) -> None:
    """Rescales the query weights in place so that attention scores keep their scale.

    Attention divides scores by the square root of the head width and, if `numbered`, by the layer number counted from
    1; narrower heads or new layer numbers would change the scale.
    """
    narrower = math.sqrt(new.head_width / old.head_width)
    factors = [narrower * ((i + 1) / (was + 1) if numbered else 1) for i, was in enumerate(new.layers)]
    lengths = axis_lengths(new)
    for name, weight in weights.items():
        number = layer_number(name, family)
        if number is None or factors[number] == 1 or not weight.is_floating_point():
            continue
        for axis, axis_role in enumerate(family.roles(name, weight.dim())):
            for role, start, end in parts_of(axis_role, lengths):
                if role == "q":
                    weight.narrow(axis, start, end - start).mul_(factors[number])
