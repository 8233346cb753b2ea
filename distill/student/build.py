"""Construction of a smaller model of the teacher's own class from the teacher's weights."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.layers import find_layer_stack
from distill.errors import InputError
from distill.models.sentence_encoder import get_stock_body
from distill.slicing.config import WeightShapes, resize_config
from distill.slicing.tracing.axes import Slot
from distill.slicing.tracing.classify import OUTER, find_layer
from distill.slicing.tracing.trace import Traced, trace
from distill.slicing.weights import Weights, cut_weights, select_layers
from distill.student.bottleneck import bottleneck_config, build_bottlenecks
from distill.student.embeddings import factorize_all_tables
from distill.student.family import FAMILIES, Family, find_family
from distill.student.fitted_norms import fit_student_norms
from distill.student.modernbert_first_layer import fold_first_attention_norm
from distill.student.norms import check_family_kind
from distill.student.selection import select_coordinates
from distill.student.sizes import Sizes
from distill.student.spec import parse_spec, resolve_sizes
from distill.student.token_vectors import build_token_vectors, token_vectors_config


def build_student(
    teacher: PreTrainedModel,
    spec: str,
    seed: int = 0,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    pair: bool = False,
) -> PreTrainedModel:
    """Builds a model of the teacher's class with the sizes of `spec` from a selected part of the teacher's weights.

    The layers are those of the spec; of each width the coordinates with the largest weights are kept, the same ones in
    every weight that uses them. With the teacher's own sizes the student equals the teacher. The weights of a `fresh`
    spec are drawn at random from `seed`, as are the blocks of a bottleneck student, see `build_bottlenecks`. Where the
    stock class treats a layer according to its position, the weights compensate for a changed position; for ModernBERT
    only approximately, see `fold_first_attention_norm`. Another kind of normalization replaces that of the built
    student, see `fit_student_norms`. A student without attention has a class of its own, see `build_token_vectors`.

    Args:
        teacher: The teacher.
        spec: Preset and sizes; see `StudentConfig`.
        seed: Of random weights.
        tokenizer: The teacher's; needed for a student without attention.
        pair: The rows have two texts each; matters to a student without attention.

    Raises:
        InputError: The family is not supported, the sizes are not possible, or it can't have the requested norms.

    Source: layers as in Sanh et al. 2019 (arXiv 1910.01108, section 3); widths as in Xu et al. 2024, Weight Selection
    (arXiv 2311.18823), but by the norm of all weights that a coordinate runs through instead of evenly.
    """
    parsed = parse_spec(spec)
    if parsed.is_bottleneck:
        student = build_bottlenecks(teacher, parsed, seed)
    elif parsed.is_attention_free:
        student = build_token_vectors(teacher, parsed, tokenizer, seed, pair=pair)
    else:
        student = build_sliced(teacher, spec, seed, fresh=parsed.fresh)
    if parsed.norm:
        student = fit_student_norms(student, parsed.norm, seed)
    if getattr(teacher, "generation_config", None) is not None:
        student.generation_config = copy.deepcopy(teacher.generation_config)  # contains the end tokens
    result: PreTrainedModel = student.eval()
    return result


def build_sliced(teacher: PreTrainedModel, spec: str, seed: int, *, fresh: bool) -> PreTrainedModel:
    """Builds a student of the teacher's own class."""
    config = student_config(teacher.config, spec)
    if fresh:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return type(teacher)(config)
    student = type(teacher)(config)
    student.load_state_dict(teacher.state_dict() if spec == "teacher" else slice_weights(teacher, student, spec))
    return student


def slice_weights(teacher: PreTrainedModel, student: PreTrainedModel, spec: str) -> Weights:
    """Returns the weights of the teacher that the student consists of; `student` determines their shapes only.

    Raises:
        InputError: The teacher's layers aren't in one list, or a width that changes can't be traced.
    """
    family, stack = find_family(teacher.config), find_layer_stack(teacher)
    old = family.sizes(teacher.config)
    new = resolve_sizes(spec, old)
    weights = select_layers({k: v.detach() for k, v in teacher.state_dict().items()}, stack, new.layers)
    if family.first_layer_lacks_attention_norm:
        index = new.layers.index(0) if 0 in new.layers else None
        weights = fold_first_attention_norm(weights, new.layers[0], index, teacher.config.norm_eps)
    numbered = getattr(teacher.config, "scale_attn_by_inverse_layer_idx", False)
    factors = list_query_factors(old, new, numbered=numbered)
    left_out: Mapping[str, str] = {}
    if has_other_widths(old, new) or set(factors) != {1.0}:
        traced = trace(get_stock_body(teacher)).select_layers(stack, new.layers)
        left_out = traced.left_out
        traced = widen_hidden_axis(
            traced, list_weight_shapes(weights), list_weight_shapes(student.state_dict()), old, new
        )
        cuts = select_coordinates(weights, traced, stack, old, new)
        weights = cut_weights(rescale_queries(weights, traced, stack, factors), cuts)
    if new.embeddings:
        weights = factorize_all_tables(weights, family.embedding_projection, new.embeddings)
    check_shapes(list_weight_shapes(weights), list_weight_shapes(student.state_dict()), left_out, spec)
    return weights


def has_other_widths(old: Sizes, new: Sizes) -> bool:
    """Returns whether sizes other than the number of layers differ."""
    before, after = ((each.hidden, each.heads, each.key_value_heads, each.head_width, each.ffn) for each in (old, new))
    return before != after


def list_weight_shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of each weight."""
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def widen_hidden_axis(traced: Traced, before: WeightShapes, after: WeightShapes, old: Sizes, new: Sizes) -> Traced:
    """Returns the traced axes, with the hidden axis extended to dimensions that the trace doesn't connect to it.

    These are outputs that the class builds from the hidden size, such as those of a pooler without a head after it,
    and weights that the teacher lacks.

    Args:
        traced: What was traced, for the student's layers.
        before, after: Shapes of the weights in the teacher and in the student.
        old, new: Sizes of the teacher and of the student.
    """
    placed = {(slot.parameter, slot.dim) for axis in (*traced.axes, *traced.joined) for slot in axis.slots}
    outer = tuple(
        Slot(name, dim, 1, 1, "out")
        for name in before.keys() & after.keys()
        for dim, sizes in enumerate(zip(before[name], after[name], strict=False))
        if sizes == (old.hidden, new.hidden) and (name, dim) not in placed
        if traced.left_out.get(f"{name}[{dim}]", OUTER) == OUTER
    )
    axes = (replace(axis, slots=(*axis.slots, *outer)) if axis.kind == "hidden" else axis for axis in traced.axes)
    return replace(traced, axes=tuple(axes))


def list_query_factors(old: Sizes, new: Sizes, *, numbered: bool) -> list[float]:
    """Returns, for each layer of the student, the factor on its queries by which attention scores keep their scale.

    Attention divides scores by the square root of the head width and, if `numbered`, by the layer number counted from
    1; narrower heads or new layer numbers would change the scale.
    """
    narrower = math.sqrt(new.head_width / old.head_width)
    return [narrower * ((i + 1) / (was + 1) if numbered else 1) for i, was in enumerate(new.layers)]


def rescale_queries(weights: Weights, traced: Traced, stack: str, factors: Sequence[float]) -> Weights:
    """Returns the weights with those of queries multiplied by their layer's factor."""
    scaled: Weights = {}
    for each in traced.projections:
        layer = find_layer(each.parameter, stack)
        if each.part != "query" or layer is None or factors[layer] == 1:
            continue
        scaled.setdefault(each.parameter, weights[each.parameter].clone())
        scaled[each.parameter].narrow(each.dim, each.start, each.size).mul_(factors[layer])
    return weights | scaled


def check_shapes(found: WeightShapes, expected: WeightShapes, left_out: Mapping[str, str], spec: str) -> None:
    """Checks that the selected weights are those of the student's class.

    Raises:
        InputError: A weight is missing, or has another shape, with the reason why tracing left it out.
    """
    for name in [*expected, *found]:
        if found.get(name) == expected.get(name):
            continue
        before, after = found.get(name, ()), expected.get(name, ())
        dims = [d for d, sizes in enumerate(zip(before, after, strict=False)) if sizes[0] != sizes[1]]
        reasons = [left_out[key] for key in (f"{name}[{d}]" for d in dims) if key in left_out]
        raise InputError(
            f"student {spec}: expected {name} of {list(after) or 'no size'} in the student's class, found "
            f"{list(before) or 'none'}: {reasons[0] if reasons else 'tracing finds no units of it to remove'}"
        )


def student_config(teacher: PretrainedConfig, spec: str) -> PretrainedConfig:
    """Returns the config of the student that `spec` requests, before norms of another kind replace its own.

    Raises:
        InputError: The sizes are not possible, the config has no attribute for one of them, or the family can't have
            the requested norms.
    """
    if spec == "teacher":  # works for any family, since nothing is removed
        return copy.deepcopy(teacher)
    parsed = parse_spec(spec)
    if parsed.is_bottleneck:
        return bottleneck_config(teacher, parsed)
    if parsed.is_attention_free:
        return token_vectors_config(teacher, parsed)
    if parsed.norm:
        check_family_kind(parsed.norm, teacher.model_type)
    family, old = find_family(teacher), read_teacher_sizes(teacher)
    new = resolve_sizes(spec, old)
    if family.attention_width_attribute and new.heads != old.heads:
        raise InputError(
            f"student heads={new.heads}: expected the teacher's {old.heads}, found another number: the width of this "
            "family's attention is fixed"
        )
    config = resize_config(
        teacher, new.layers, new.hidden, heads=new.heads, key_value_heads=new.key_value_heads, ffn=new.ffn
    )
    if family.config_sets_head_width:
        config.head_dim = new.head_width
    if new.embeddings:
        check_embeddings(new, family, teacher.model_type)
        config.embedding_size = new.embeddings
    elif family.attention_width_attribute:  # this class projects embeddings of any width
        config.embedding_size = teacher.embedding_size
    elif getattr(teacher, "embedding_size", old.hidden) == config.hidden_size != old.hidden:
        # ELECTRA projects its embeddings only where they are narrower than the layers.
        raise InputError(
            f"student hidden={config.hidden_size}: the teacher's embeddings have this width too, and then the stock "
            "class has no projection between embeddings and layers; take another width"
        )
    return config


def read_teacher_sizes(config: PretrainedConfig) -> Sizes:
    """Returns the sizes in a teacher's config.

    Raises:
        InputError: The teacher was pruned, or its config has no attribute for one of the sizes.
    """
    if hasattr(config, "norms"):
        raise InputError(
            f"student: can't be built from a teacher of type {config.model_type!r}: its norms aren't those of a stock "
            "class. Name a checkpoint with --student instead"
        )
    if hasattr(config, "pruned"):
        raise InputError(
            f"student: can't be built from a teacher of type {config.model_type!r}: its layers differ in their sizes. "
            "Name a checkpoint with --student instead"
        )
    try:
        return find_family(config).sizes(config)
    except AttributeError as error:
        raise InputError(
            f"student: can't be built from a teacher of type {config.model_type!r}, whose sizes are unknown: {error}. "
            "Name a checkpoint with --student instead"
        ) from error


def check_embeddings(new: Sizes, family: Family, name: str) -> None:
    """Checks that the student's embeddings can have their own width.

    Raises:
        InputError: The family has no projection from embeddings to layers, or the embeddings are not narrower than the
            layers.
    """
    if not family.embedding_projection:
        having = ", ".join(each for each, known in FAMILIES.items() if known.embedding_projection)
        raise InputError(
            f"student embeddings={new.embeddings}: the stock class of a {name!r} has no map between embeddings and "
            f"layers; {having} and the bottleneck presets have one; --prune.embedding_rank writes its own class"
        )
    if new.embeddings >= new.hidden:
        raise InputError(
            f"student embeddings={new.embeddings}: expected less than hidden, {new.hidden}: a table as wide as the "
            "layers needs no map, and there would be more weights than before"
        )
