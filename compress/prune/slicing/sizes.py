"""The config of a pruned model: the stock config with other sizes, or that of the class shipped with the weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from compress.prune.slicing import modeling_pruned

FFN = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim", "d_ff")  # the feed-forward width, by model family
BY_HEADS = ("num_attention_heads", "num_heads", "n_heads", "num_key_value_heads", "all_head_size", "split_size")
PLACED = {"layer_idx", "name_or_path", "training"}  # depend on a module's position or origin, not on its computation
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a pruned model.

    Args:
        stack: Name of the module list that holds the layers.
        layers: Indices of the kept layers in the model before any pruning.
        hidden: Width of the residual stream.
        vocabulary, pad: Number of tokens and padding id; None if all tokens are kept.
        heads, ffn: Units in each kept layer; empty if the model has no such axis.
        width: Width of a head; None if there is no axis of heads.
        rank: Rank of a factorised token embedding; 0 if it isn't factorised.
    """

    stack: str
    layers: tuple[int, ...]
    hidden: int
    vocabulary: int | None
    pad: int | None
    heads: tuple[int, ...]
    ffn: tuple[int, ...]
    width: int | None
    rank: int = 0


def is_pruned(model: PreTrainedModel) -> bool:
    """Returns whether the model is of the class shipped with the weights rather than a stock class."""
    return getattr(model.config, "pruned", None) is not None


def embedding_rank(model: PreTrainedModel) -> int:
    """Returns the rank of the model's token embedding if it is factorised, otherwise 0."""
    return model.config.pruned.get("embedding_rank", 0) if is_pruned(model) else 0


def head_width(config: PreTrainedConfig) -> int:
    """Returns the width of a head, for models in which all heads have the same width."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def dense_stock_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the stock config of the model before any pruning, except for the vocabulary, which is the current one."""
    return copy.deepcopy(config) if getattr(config, "pruned", None) is None else modeling_pruned.dense_config(config)


def empty_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model on the meta device, with names, shapes and settings but no storage."""
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(config))


def filled_model(
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
    return new.to(like.device).train(like.training)


def resized(config: PreTrainedConfig, sizes: Sizes) -> PreTrainedConfig:
    """Returns a copy of a dense stock config with the given sizes; of sizes that differ between layers, the largest."""
    new = copy.deepcopy(config)
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    cut_layers(new, sizes.layers)
    if getattr(new, "embedding_size", None) == config.hidden_size:  # ELECTRA without a projection
        new.embedding_size = sizes.hidden
    new.hidden_size = sizes.hidden
    if sizes.vocabulary is not None:
        new.vocab_size, new.pad_token_id = sizes.vocabulary, sizes.pad
    if sizes.heads:
        new.num_attention_heads = max(sizes.heads) * groups
        if getattr(new, "num_key_value_heads", None) is not None:
            new.num_key_value_heads = max(sizes.heads)
    if sizes.ffn:
        setattr(new, next(name for name in FFN if hasattr(new, name)), max(sizes.ffn))
    if sizes.width and new.hidden_size != new.num_attention_heads * sizes.width:
        new.head_dim = sizes.width  # used by the classes whose heads need not add up to the hidden size
    return new


def cut_layers(config: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Reduces the layer count and every list with one entry per layer, such as layer_types, to `layers`."""
    count = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[i] for i in layers])
    config.num_hidden_layers = len(layers)


def stock_config(kind: type[PreTrainedModel], dense: PreTrainedConfig, sizes: Sizes, shapes: Shapes) -> Any:
    """Returns the config with which the stock class equals the pruned model, or the reason (str) why there is none."""
    if sizes.rank:
        return f"its words are a table of {sizes.rank} columns and a projection, and its class has one whole table"
    for what, units in (("heads", sizes.heads), ("feed-forward units", sizes.ffn)):
        if len(set(units)) > 1:
            return f"its layers keep {min(units)} to {max(units)} {what}, and its config has one number for all"
    try:
        config = type(dense).from_dict(resized(dense, sizes).to_dict())  # validates it as reloading does
        made = empty_model(kind, config)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, StrictDataclassError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    built = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    for name in sorted(built.keys() | shapes.keys()):
        if built.get(name) != shapes.get(name):
            return f"{name}: the pruned model has {shapes.get(name)}, {kind.__name__} builds {built.get(name)}"
    return difference(empty_model(kind, dense), made, sizes) or config


def difference(dense: PreTrainedModel, made: PreTrainedModel, sizes: Sizes) -> str | None:
    """Returns how a kept layer of the stock class would differ from the layer before pruning, None if it doesn't."""
    scaled = changed_numbers(dense.config, made.config, sizes.width)
    before = {renamed(name, sizes.stack, sizes.layers): module for name, module in dense.named_modules()}
    for name, module in made.named_modules():
        old = before[name]
        if type(old) is not type(module):
            return f"{name}: it was {type(old).__name__}, the stock class builds {type(module).__name__}"
        was, now = settings(old), settings(module)
        for key in was.keys() | now.keys():
            pair = was.get(key), now.get(key)
            if pair[0] != pair[1] and pair not in scaled:
                return f"{name}.{key}: it was {pair[0]}, the stock class makes it {pair[1]}"
    return None


def settings(module: nn.Module) -> dict[str, Any]:
    """Returns the plain settings of a module and the shapes of its buffers. Sizes of weights are compared as shapes."""
    kinds = (bool, float, str, type(None)) if module._parameters else (bool, int, float, str, type(None))
    plain = {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k not in PLACED and k[0] != "_"}
    return plain | {name: tuple(buffer.shape) for name, buffer in module.named_buffers(recurse=False)}


def changed_numbers(dense: PreTrainedConfig, new: PreTrainedConfig, width: int | None) -> set[tuple[Any, Any]]:
    """Returns (before, now) of every number in the config that pruning changed; modules store copies of them."""
    was, now = dense.to_dict(), new.to_dict()
    pairs = {(value, now.get(key)) for key, value in was.items() if isinstance(value, int | None)}
    pairs |= {(dense.num_attention_heads * (width or 1), new.num_attention_heads * (width or 1))}
    return {pair for pair in pairs if pair[0] != pair[1]}


def renamed(name: str, stack: str, layers: Sequence[int]) -> str | None:
    """Returns the name of a weight or module once only `layers` are kept; None if it belongs to a removed layer."""
    if not name.startswith(f"{stack}."):
        return name
    number, dot, rest = name[len(stack) + 1 :].partition(".")
    return f"{stack}.{layers.index(int(number))}{dot}{rest}" if int(number) in layers else None


def pruned_config(
    kind: type[PreTrainedModel], dense: PreTrainedConfig, sizes: Sizes, shapes: Shapes, held: Mapping[str, dict]
) -> PreTrainedConfig:
    """Returns the config of the shipped class; `held` are the numbers stored in its modules."""
    visible = copy.deepcopy(dense)
    if sizes.vocabulary is not None:
        visible.vocab_size, visible.pad_token_id = sizes.vocabulary, sizes.pad
    built = empty_model(kind, visible)
    modeling_pruned.factorise(built, sizes.rank)
    before = {renamed(name, sizes.stack, sizes.layers): tensor.shape for name, tensor in built.state_dict().items()}
    cuts = {
        name: [new if new != old else None for new, old in zip(shape, before[name], strict=True)]
        for name, shape in shapes.items()
    }
    pruned = {
        "stack": sizes.stack,
        "layers": list(sizes.layers),
        "shapes": {name: cut for name, cut in cuts.items() if any(size is not None for size in cut)},
        "attributes": dict(held),
        "embedding_rank": sizes.rank,
    }
    new_class = getattr(modeling_pruned, f"Pruned{type(dense).__name__}")
    code = modeling_pruned.__name__.rpartition(".")[2]
    names = {"AutoConfig": new_class.__name__, modeling_pruned.auto_class(kind): f"Pruned{kind.__name__}"}
    old = visible.to_dict()
    now = resized(visible, sizes).to_dict()
    pruned["dense"] = {key: value for key, value in old.items() if now.get(key) != value}
    del now["model_type"]
    return new_class.from_dict(now | {"pruned": pruned, "auto_map": {k: f"{code}.{v}" for k, v in names.items()}})
