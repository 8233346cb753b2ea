"""Physical pruning: a new, smaller model built from the kept weights, and the equivalent masked model."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CompressError
from compress.prune.slicing import modeling_pruned
from compress.prune.slicing.embedding_rank import joined_shapes, joined_weights, kept_rank
from compress.prune.slicing.sizes import (
    BY_HEADS,
    Sizes,
    dense_stock_config,
    embedding_rank,
    filled_model,
    is_pruned,
    pruned_config,
    renamed,
    stock_config,
)
from compress.prune.tracing.axes import Axis, Kept
from compress.prune.tracing.trace import layer_stack


@dataclass(frozen=True, eq=False)
class Shape:
    """The layers and units that are kept.

    Args:
        layers: Indices of the kept layers, ascending.
        kept: Axis name -> indices of the kept units, ascending, int64 [n]; axes have the names they have in the model
            before pruning, and axes that aren't listed are kept whole.
    """

    layers: tuple[int, ...]
    kept: Kept = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the shape as lists and numbers that JSON supports."""
        return {"layers": list(self.layers), "kept": {name: units.tolist() for name, units in self.kept.items()}}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Shape":
        kept = {name: torch.tensor(units, dtype=torch.int64) for name, units in plain["kept"].items()}
        return cls(tuple(plain["layers"]), kept)


def prune(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape, *, uniform: bool = False) -> PreTrainedModel:
    """Returns a new model with only the layers and units in `shape`; `model` isn't modified and shares no memory.

    The new model is of the stock class if that can express the shape, otherwise of the class in modeling_pruned.py,
    which save_pretrained writes beside the weights. With a pruned vocabulary, the padding id becomes the new index of
    its row; other ids in the config are unchanged. A factorised token embedding is merged into one table if, at the
    pruned hidden size, the factors would save nothing.

    Args:
        model: A stock model, or one that was pruned before.
        axes: The model's axes, as returned by `find_axes`.
        shape: The layers and units to keep.
        uniform: Whether to require the stock class.

    Raises:
        CompressError: The shape doesn't fit the model, or `uniform` is set and the stock class can't express it.
    """
    plan = planned(model, axes, shape)
    if uniform and plan.reason is not None:
        raise CompressError(
            f"{plan.stock.__name__} can't express this shape: {plan.reason}; without uniform=True the checkpoint would "
            "ship its own modelling code"
        )
    weights = slice_weights(model.state_dict(), axes, shape, layer_stack(model))
    if embedding_rank(model) and not plan.rank:
        weights = joined_weights(model, weights)
    return filled_model(plan.kind, plan.config, weights, model)


def slice_weights(weights: Mapping[str, Tensor], axes: Sequence[Axis], shape: Shape, stack: str) -> dict[str, Tensor]:
    """Returns the kept weights with layers renumbered; weights that aren't sliced are the given tensors themselves.

    Args:
        weights: A state_dict.
        axes, shape: The axes, and the layers and units to keep.
        stack: Name of the module list that holds the layers, as returned by `layer_stack`.
    """
    kept = {}
    cuts = coordinates(axes, shape)
    for name, weight in weights.items():
        new = renamed(name, stack, shape.layers)
        if new is None:
            continue
        for dim, places in cuts.get(name, ()):
            weight = weight.index_select(dim, places.to(weight.device))
        kept[new] = weight
    return kept


def coordinates(axes: Sequence[Axis], shape: Shape) -> dict[str, list[tuple[int, Tensor]]]:
    """Returns parameter -> (dimension, its kept coordinates) for every pruned dimension."""
    cuts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for axis in axes:
        if axis.name in shape.kept:
            for slot in axis.slots:
                cuts[slot.parameter].append((slot.dim, axis.coordinates(slot, shape.kept[axis.name].cpu())))
    return cuts


def check_shape(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> None:
    """Checks that the shape names existing layers and units and leaves at least one of each."""
    by_name = {axis.name: axis for axis in axes}
    check_rising("layers", shape.layers, model.config.num_hidden_layers)
    for name, units in shape.kept.items():
        if name not in by_name:
            near = get_close_matches(name, by_name, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {sorted(by_name)}"
            raise CompressError(f"{name}: no such axis, so nothing would be cut{hint}")
        if units.dim() != 1 or units.dtype not in (torch.int64, torch.int32):
            raise CompressError(f"{name}: expected int64 [units], found {units.dtype} {list(units.shape)}")
        check_rising(name, units.tolist(), by_name[name].units)


def check_rising(name: str, numbers: Sequence[int], count: int) -> None:
    if not numbers:
        raise CompressError(f"{name}: expected at least one of {count} to stay, found none: no signal would pass")
    rises = all(a < b for a, b in zip(numbers, numbers[1:], strict=False))
    if not rises or numbers[0] < 0 or numbers[-1] >= count:
        raise CompressError(f"{name}: expected rising numbers from 0 to {count - 1}, found {list(numbers)[:20]}")


def padding(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> int | None:
    """Returns the padding id once the vocabulary is pruned."""
    pad, rows = model.config.pad_token_id, shape.kept["vocabulary"].tolist()
    if pad is None or pad < 0:
        return pad
    if pad not in rows:
        raise CompressError(
            f"vocabulary: expected the padding id {pad} to stay, found it gone: nothing could be padded"
        )
    words = model.get_input_embeddings()
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and module is not words
            and module.padding_idx not in (None, rows.index(pad))
        ):
            raise CompressError(
                f"vocabulary: expected the padding id {pad} to keep its number, found {rows.index(pad)}: {name} counts "
                "positions from it, and all would shift"
            )
    return rows.index(pad)


@dataclass(frozen=True)
class Plan:
    """The class and config of the model to build.

    Args:
        kind: Class of the model.
        stock: The stock class that it is or derives from.
        config: Config of the model.
        reason: Why `kind` isn't the stock class; None if it is.
        rank: Rank of a factorised token embedding, 0 if it isn't factorised.
    """

    kind: type[PreTrainedModel]
    stock: type[PreTrainedModel]
    config: Any
    reason: str | None
    rank: int


def planned(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> Plan:
    """Chooses the class by building an empty model of the stock class and comparing it with the pruned shapes."""
    check_shape(model, axes, shape)
    stock = type(model).stock if is_pruned(model) else type(model)  # type: ignore[attr-defined]
    dense, sizes = dense_stock_config(model.config), sizes_of(model, axes, shape)
    if sizes.vocabulary is not None:
        dense.vocab_size, dense.pad_token_id = sizes.vocabulary, sizes.pad
    shapes = sliced_shapes(model, axes, shape)
    found = stock_config(stock, dense, sizes, shapes)
    if not isinstance(found, str):
        return Plan(stock, stock, found, None, sizes.rank)
    kind = getattr(modeling_pruned, f"Pruned{stock.__name__}")
    config = pruned_config(stock, dense, sizes, shapes, head_attributes(model, axes, shape))
    return Plan(kind, stock, config, found, sizes.rank)


def sizes_of(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> Sizes:
    left = {axis.name: len(shape.kept[axis.name]) if axis.name in shape.kept else axis.units for axis in axes}
    before = model.config.pruned["layers"] if is_pruned(model) else range(model.config.num_hidden_layers)
    cut = "vocabulary" in shape.kept
    return Sizes(
        stack=layer_stack(model),
        layers=tuple(before[i] for i in shape.layers),
        hidden=left.get("hidden", model.config.hidden_size),
        vocabulary=left["vocabulary"] if cut else None,
        pad=padding(model, axes, shape) if cut else None,
        heads=tuple(left[name] for i in shape.layers if (name := f"layers.{i}.heads") in left),
        ffn=tuple(left[name] for i in shape.layers if (name := f"layers.{i}.ffn") in left),
        width=min((slot.inner for axis in axes if axis.kind == "heads" for slot in axis.slots), default=None),
        rank=kept_rank(model, sliced_shapes(model, axes, shape)),
    )


def sliced_shapes(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of each weight of the pruned model, without slicing any."""
    cuts = {name: {dim: len(places) for dim, places in cut} for name, cut in coordinates(axes, shape).items()}
    stack = layer_stack(model)
    found = {
        new: tuple(cuts.get(name, {}).get(d, size) for d, size in enumerate(weight.shape))
        for name, weight in model.state_dict().items()
        if (new := renamed(name, stack, shape.layers)) is not None
    }
    return joined_shapes(model, found)


def head_attributes(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> dict[str, dict[str, int]]:
    """Returns module -> its attributes that depend on the number of heads, after pruning and under its new name."""
    stack = layer_stack(model)
    before = model.config.pruned["attributes"] if is_pruned(model) else {}
    names = {name: renamed(name, stack, shape.layers) for name in before}
    found = {new: dict(before[name]) for name, new in names.items() if new is not None}
    for axis in axes:
        if axis.kind != "heads" or axis.layer not in shape.layers:
            continue
        left = len(shape.kept[axis.name]) if axis.name in shape.kept else axis.units
        for name, module in model.get_submodule(f"{stack}.{axis.layer}").named_modules(prefix=f"{stack}.{axis.layer}"):
            held = {key: vars(module)[key] * left // axis.units for key in BY_HEADS if key in vars(module)}
            if held:
                found[str(renamed(name, stack, shape.layers))] = held
    return found


@torch.no_grad()
def masked(model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> PreTrainedModel:
    """Returns a full-size copy in which removed units and layers have no effect: the reference for a pruned model.

    Removed units are zero in every weight, norms use the kept hidden coordinates only, and dropped layers return their
    input. Removed tokens aren't masked, since their ids don't occur.
    """
    check_shape(model, axes, shape)
    copied = copy.deepcopy(model)
    weights = dict(copied.named_parameters(remove_duplicate=False))
    for axis in (axis for axis in axes if axis.name in shape.kept and axis.kind != "vocabulary"):
        if axis.kind == "hidden":
            for path in sorted({slot.parameter.rpartition(".")[0] for slot in axis.slots if slot.role == "scale"}):
                narrow_norm(copied.get_submodule(path), shape.kept[axis.name].to(model.device))
        gone = torch.ones(axis.units, dtype=torch.bool)
        gone[shape.kept[axis.name].cpu()] = False
        for slot in axis.slots:
            places = axis.coordinates(slot, gone.nonzero()[:, 0]).to(model.device)
            weights[slot.parameter].index_fill_(slot.dim, places, 0.0)
    layers: Any = copied.get_submodule(layer_stack(copied))
    for i in set(range(len(layers))) - set(shape.layers):
        bypass(layers[i])
    return copied


def bypass(layer: nn.Module) -> None:
    """Makes a layer return its input hidden states, along with its other outputs."""
    inner = layer.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = inner(hidden_states, *args, **kwargs)
        return (hidden_states, *made[1:]) if isinstance(made, tuple) else hidden_states

    layer.forward = forward


def narrow_norm(norm: nn.Module, kept: Tensor) -> None:
    """Makes a norm use only the coordinates `kept` of its input and return 0 at the others."""
    small = copy.deepcopy(norm)
    for name, weight in small.named_parameters():
        setattr(small, name, nn.Parameter(weight[kept]))
    if isinstance(small, nn.LayerNorm):
        small.normalized_shape = (len(kept),)

    def forward(hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states).index_copy(-1, kept, small(hidden_states[..., kept]))

    norm.forward = forward
