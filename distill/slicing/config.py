"""The config of a smaller model: the stock config with other sizes, or that of the class shipped with the weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from distill.checkpoint.custom_models import has_custom_norms, modeling_pruned
from distill.checkpoint.layers import rename_layer, select_layer_settings
from distill.errors import InputError
from distill.slicing.attributes import FFN, find_attribute

AS_HIDDEN = ("embedding_size", "pooler_hidden_size")  # widths that equal the hidden size unless a family sets them
POSITIONAL = {"layer_idx", "name_or_path", "training"}  # depend on a module's position or origin, not its computation
WeightShapes = Mapping[str, tuple[int, ...]]
Setting = bool | int | float | str | tuple[int, ...] | None


@dataclass(frozen=True)
class PrunedSizes:
    """The sizes of a pruned model.

    Args:
        stack: Name of the module list that holds the layers.
        layers: Indices of the kept layers in the model before any pruning.
        hidden: Width of the residual stream.
        vocabulary, pad: Number of tokens and padding id; None if all tokens are kept.
        heads, ffn: Units in each kept layer; empty if the model has no such axis.
        width: Width of a head; None if there is no axis of heads.
        rank: Rank of a factorized token embedding; 0 if it isn't factorized.
    """

    stack: str
    layers: tuple[int, ...]
    hidden: int
    vocabulary: int | None = None
    pad: int | None = None
    heads: tuple[int, ...] = ()
    ffn: tuple[int, ...] = ()
    width: int | None = None
    rank: int = 0


def check_stock_norms(model: PreTrainedModel) -> None:
    """Checks that a model has the norms of its stock class.

    Raises:
        InputError: It has others, which the classes of pruned models don't have.
    """
    if has_custom_norms(model):
        kinds = sorted(set(model.config.norms.values()))
        raise InputError(
            f"{type(model).__name__}: expected the norms of the stock class, found {', '.join(kinds)}: the class of "
            "pruned models has none of them, so it can't be pruned; build a smaller student with norm= instead"
        )


def empty_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model on the meta device, with names, shapes and settings but no storage."""
    with torch.device("meta"):
        result: PreTrainedModel = kind._from_config(copy.deepcopy(config))
        return result


def resize_config(
    config: PreTrainedConfig,
    layers: Sequence[int],
    hidden: int,
    *,
    heads: int | None = None,
    key_value_heads: int | None = None,
    ffn: int | None = None,
) -> PreTrainedConfig:
    """Returns a copy of a stock config with other sizes; None leaves a size as it is.

    Args:
        config: A stock config.
        layers: Numbers of the kept layers, in the new order.
        hidden: Width of the residual stream, and of what the family sets to the same width.
        heads: Attention heads per layer.
        key_value_heads: Key-value heads, for families that have a number of their own.
        ffn: Feed-forward units per layer.
    """
    new = copy.deepcopy(config)
    select_layer_settings(new, layers)
    for name in AS_HIDDEN:
        if getattr(new, name, None) == config.hidden_size:
            setattr(new, name, hidden)
    new.hidden_size = hidden
    if heads is not None:
        new.num_attention_heads = heads
        if getattr(new, "num_key_value_heads", None) is not None:
            new.num_key_value_heads = key_value_heads
    if ffn is not None:
        setattr(new, find_attribute(new, FFN), ffn)
    return new


def resize_pruned(config: PreTrainedConfig, sizes: PrunedSizes) -> PreTrainedConfig:
    """Returns a copy of a dense stock config with the given sizes; of sizes that differ between layers, the largest."""
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    key_value_heads = max(sizes.heads, default=None)
    heads = None if key_value_heads is None else key_value_heads * groups
    ffn = max(sizes.ffn, default=None)
    new = resize_config(config, sizes.layers, sizes.hidden, heads=heads, key_value_heads=key_value_heads, ffn=ffn)
    if sizes.vocabulary is not None:
        new.vocab_size, new.pad_token_id = sizes.vocabulary, sizes.pad
    if sizes.width and new.hidden_size != new.num_attention_heads * sizes.width:
        new.head_dim = sizes.width  # used by the classes whose heads need not add up to the hidden size
    return new


def find_stock_config(
    kind: type[PreTrainedModel], dense: PreTrainedConfig, sizes: PrunedSizes, shapes: WeightShapes
) -> PreTrainedConfig | str:
    """Returns the config with which the stock class equals the pruned model, or the reason why there is none."""
    if sizes.rank:
        return f"its token embedding is a table of {sizes.rank} columns and a projection, which its class doesn't have"
    for name, units in (("heads", sizes.heads), ("feed-forward units", sizes.ffn)):
        if len(set(units)) > 1:
            return f"its layers keep {min(units)} to {max(units)} {name}, and its config has one number for all"
    try:
        config = type(dense).from_dict(resize_pruned(dense, sizes).to_dict())  # validates it as reloading does
        stock = empty_model(kind, config)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, StrictDataclassError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    stock_shapes = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    for name in sorted(stock_shapes.keys() | shapes.keys()):
        if stock_shapes.get(name) != shapes.get(name):
            return f"{name}: the pruned model has {shapes.get(name)}, {kind.__name__} builds {stock_shapes.get(name)}"
    return find_difference(empty_model(kind, dense), stock, sizes) or config


def find_difference(dense: PreTrainedModel, stock: PreTrainedModel, sizes: PrunedSizes) -> str | None:
    """Returns how a kept layer of the stock class differs from the layer before pruning, None if it doesn't."""
    changes = list_changed_numbers(dense.config, stock.config, sizes.width)
    dense_modules = {rename_layer(name, sizes.stack, sizes.layers): module for name, module in dense.named_modules()}
    for name, module in stock.named_modules():
        old = dense_modules[name]
        if type(old) is not type(module):
            return f"{name}: it was {type(old).__name__}, the stock class builds {type(module).__name__}"
        before, after = list_module_settings(old), list_module_settings(module)
        for key in before.keys() | after.keys():
            pair = before.get(key), after.get(key)
            if pair[0] != pair[1] and pair not in changes:
                return f"{name}.{key}: it was {pair[0]}, the stock class sets it to {pair[1]}"
    return None


def list_module_settings(module: nn.Module) -> dict[str, Setting]:
    """Returns the plain settings of a module and the shapes of its buffers. Sizes of weights are compared as shapes."""
    kinds = (bool, float, str, type(None)) if module._parameters else (bool, int, float, str, type(None))
    plain = {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k not in POSITIONAL and k[0] != "_"}
    return plain | {name: tuple(buffer.shape) for name, buffer in module.named_buffers(recurse=False)}


def list_changed_numbers(
    dense: PreTrainedConfig, new: PreTrainedConfig, width: int | None
) -> set[tuple[Setting, Setting]]:
    """Returns (before, after) of every number in the config that pruning changed; modules store copies of them."""
    before, after = dense.to_dict(), new.to_dict()
    pairs = {(value, after.get(key)) for key, value in before.items() if isinstance(value, int | None)}
    pairs |= {(dense.num_attention_heads * (width or 1), new.num_attention_heads * (width or 1))}
    return {pair for pair in pairs if pair[0] != pair[1]}


def build_pruned_config(
    kind: type[PreTrainedModel],
    dense: PreTrainedConfig,
    sizes: PrunedSizes,
    shapes: WeightShapes,
    attributes: Mapping[str, Mapping[str, int]],
) -> PreTrainedConfig:
    """Returns the config of the shipped class.

    Args:
        kind: The stock class.
        dense: Its config before pruning.
        sizes, shapes: Those of the pruned model.
        attributes: Name of a module -> numbers that it stores, such as its number of heads.
    """
    visible = copy.deepcopy(dense)
    if sizes.vocabulary is not None:
        visible.vocab_size, visible.pad_token_id = sizes.vocabulary, sizes.pad
    whole = empty_model(kind, visible)
    modeling_pruned.factorize(whole, sizes.rank)
    weights = whole.state_dict()
    full = {rename_layer(name, sizes.stack, sizes.layers): tensor.shape for name, tensor in weights.items()}
    cuts = {
        name: [new if new != old else None for new, old in zip(shape, full[name], strict=True)]
        for name, shape in shapes.items()
    }
    pruned = {
        "stack": sizes.stack,
        "layers": list(sizes.layers),
        "shapes": {name: cut for name, cut in cuts.items() if any(size is not None for size in cut)},
        "attributes": {name: dict(numbers) for name, numbers in attributes.items()},
        "embedding_rank": sizes.rank,
    }
    new_class = getattr(modeling_pruned, f"Pruned{type(dense).__name__}")
    code = modeling_pruned.__name__.rpartition(".")[2]
    names = {"AutoConfig": new_class.__name__, modeling_pruned.auto_class(kind): f"Pruned{kind.__name__}"}
    before = visible.to_dict()
    after = resize_pruned(visible, sizes).to_dict()
    pruned["dense"] = {key: value for key, value in before.items() if after.get(key) != value}
    del after["model_type"]
    config = new_class.from_dict(after | {"pruned": pruned, "auto_map": {k: f"{code}.{v}" for k, v in names.items()}})
    assert isinstance(config, PreTrainedConfig)
    return config
