"""Physical pruning: a new, smaller model built from the kept weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from distill.checkpoint.custom_models import modeling_pruned
from distill.checkpoint.custom_models.model import dense_stock_config, embedding_rank, is_pruned
from distill.checkpoint.layers import find_layer_stack, rename_layer
from distill.errors import InputError
from distill.slicing.config import PrunedSizes, build_pruned_config, check_stock_norms, find_stock_config
from distill.slicing.factors import find_kept_rank, merge_factor_shapes, merge_factors
from distill.slicing.shape import Shape, check_shape
from distill.slicing.tracing.axes import Axis
from distill.slicing.weights import cut_weights, list_cuts, select_layers

BY_HEADS = ("num_attention_heads", "num_heads", "n_heads", "num_key_value_heads", "all_head_size", "split_size")


@dataclass(frozen=True)
class ModelDefinition:
    """The class and config of the model to build.

    Args:
        kind: Class of the model.
        stock: The stock class that it is or derives from.
        config: Config of the model.
        reason: Why `kind` isn't the stock class; None if it is.
        rank: Rank of a factorized token embedding, 0 if it isn't factorized.
    """

    kind: type[PreTrainedModel]
    stock: type[PreTrainedModel]
    config: PreTrainedConfig
    reason: str | None
    rank: int


def prune(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape, *, uniform: bool = False) -> PreTrainedModel:
    """Returns a new model with only the layers and units in `shape`; `model` isn't modified and shares no memory.

    The new model is of the stock class if that can express the shape, otherwise of the class in modeling_pruned.py,
    which save_pretrained writes beside the weights. With a pruned vocabulary, the padding id becomes the new index of
    its row; other ids in the config are unchanged. A factorized token embedding is merged into one table if, at the
    pruned hidden size, the factors would save nothing.

    Args:
        model: A stock model, or one that was pruned before.
        axes: The model's axes, as returned by `find_axes`.
        shape: The layers and units to keep.
        uniform: Whether to require the stock class.

    Raises:
        InputError: The shape doesn't fit the model, or `uniform` is set and the stock class can't express it.
    """
    plan = plan_model(model, axes, shape)
    if uniform and plan.reason is not None:
        raise InputError(
            f"{plan.stock.__name__} can't express this shape: {plan.reason}; without uniform=True the checkpoint would "
            "ship its own modelling code"
        )
    weights = cut_weights(model.state_dict(), list_cuts(axes, shape.kept))
    weights = select_layers(weights, find_layer_stack(model), shape.layers)
    if embedding_rank(model) and not plan.rank:
        weights = merge_factors(model, weights)
    return build_filled(plan.kind, plan.config, weights, model)


def build_filled(
    kind: type[PreTrainedModel], config: PreTrainedConfig, weights: Mapping[str, Tensor], like: PreTrainedModel
) -> PreTrainedModel:
    """Returns a model with copies of `weights`, which must be complete; dtype, device and mode are those of `like`."""
    with no_init_weights():
        config = copy.deepcopy(config)
        new = kind._from_config(config, dtype=like.dtype, attn_implementation=like.config._attn_implementation)
    new.load_state_dict(weights, strict=True)
    new.tie_weights()
    if getattr(like, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(like.generation_config)
    result: PreTrainedModel = new.to(like.device).train(like.training)
    return result


def plan_model(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> ModelDefinition:
    """Chooses the class by building an empty model of the stock class and comparing it with the pruned shapes."""
    check_stock_norms(model)
    check_shape(model, axes, shape)
    stock = type(model).stock if is_pruned(model) else type(model)  # type: ignore[attr-defined]
    dense, sizes = dense_stock_config(model.config), measure_sizes(model, axes, shape)
    if sizes.vocabulary is not None:
        dense.vocab_size, dense.pad_token_id = sizes.vocabulary, sizes.pad
    shapes = list_pruned_shapes(model, axes, shape)
    config = find_stock_config(stock, dense, sizes, shapes)
    if not isinstance(config, str):
        return ModelDefinition(stock, stock, config, None, sizes.rank)
    kind = getattr(modeling_pruned, f"Pruned{stock.__name__}")
    pruned_config = build_pruned_config(stock, dense, sizes, shapes, list_head_attributes(model, axes, shape))
    return ModelDefinition(kind, stock, pruned_config, config, sizes.rank)


def measure_sizes(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> PrunedSizes:
    """Returns the sizes of the pruned model."""
    units = {axis.name: shape.count_units(axis) for axis in axes}
    layers = model.config.pruned["layers"] if is_pruned(model) else range(model.config.num_hidden_layers)
    cut = "vocabulary" in shape.kept
    return PrunedSizes(
        stack=find_layer_stack(model),
        layers=tuple(layers[i] for i in shape.layers),
        hidden=units.get("hidden", model.config.hidden_size),
        vocabulary=units["vocabulary"] if cut else None,
        pad=find_padding(model, shape) if cut else None,
        heads=tuple(units[name] for i in shape.layers if (name := f"layers.{i}.heads") in units),
        ffn=tuple(units[name] for i in shape.layers if (name := f"layers.{i}.ffn") in units),
        width=min((slot.inner for axis in axes if axis.kind == "heads" for slot in axis.slots), default=None),
        rank=find_kept_rank(model, list_pruned_shapes(model, axes, shape)),
    )


def find_padding(model: PreTrainedModel, shape: Shape) -> int | None:
    """Returns the padding id once the vocabulary is pruned.

    Raises:
        InputError: The padding token is removed, or a table of positions is addressed by its id.
    """
    pad, rows = model.config.pad_token_id, shape.kept["vocabulary"].tolist()
    if pad is None or pad < 0:
        result: int | None = pad
        return result
    if pad not in rows:
        raise InputError(
            f"vocabulary: expected the padding id {pad} to be kept, found it removed: no text could be padded"
        )
    new = rows.index(pad)
    table = model.get_input_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module is not table and module.padding_idx not in (None, new):
            raise InputError(
                f"vocabulary: expected the padding id {pad} to keep its number, found {new}: {name} counts positions "
                "from it, and all would shift"
            )
    return new


def list_pruned_shapes(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of each weight of the pruned model, without slicing any."""
    cuts = list_cuts(axes, shape.kept)
    sizes = {name: {dim: len(coordinates) for dim, coordinates in cut} for name, cut in cuts.items()}
    stack = find_layer_stack(model)
    shapes = {
        new: tuple(sizes.get(name, {}).get(d, size) for d, size in enumerate(weight.shape))
        for name, weight in model.state_dict().items()
        if (new := rename_layer(name, stack, shape.layers)) is not None
    }
    return merge_factor_shapes(model, shapes)


def list_head_attributes(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> dict[str, dict[str, int]]:
    """Returns module -> its attributes that depend on the number of heads, after pruning and under its new name."""
    stack = find_layer_stack(model)
    before: Mapping[str, Mapping[str, int]] = model.config.pruned["attributes"] if is_pruned(model) else {}
    names = {name: rename_layer(name, stack, shape.layers) for name in before}
    attributes = {new: dict(before[name]) for name, new in names.items() if new is not None}
    for axis in axes:
        if axis.kind != "heads" or axis.layer not in shape.layers:
            continue
        path = f"{stack}.{axis.layer}"
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            variables = vars(module)
            numbers = {
                key: variables[key] * shape.count_units(axis) // axis.units for key in BY_HEADS if key in variables
            }
            if numbers:
                attributes[str(rename_layer(name, stack, shape.layers))] = numbers
    return attributes
