"""Detection of a model's coupled dimensions by following them through its graph, independent of weight names."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_stack, rename_layer
from distill.errors import InputError
from distill.slicing.tracing.axes import Axis, Role, Slot
from distill.slicing.tracing.classify import AxisClassifier, find_layer
from distill.slicing.tracing.export import export_graph
from distill.slicing.tracing.labels import Dimension, Labels
from distill.slicing.tracing.operators import LabelPropagator, Use
from distill.slicing.tracing.projections import AttentionProjection, ProjectionFinder
from distill.slicing.tracing.reduced_copy import ReducedCopy, build_reduced_copy
from distill.slicing.tracing.reshaping import LabelledTensor


@dataclass(frozen=True)
class Traced:
    """The result of tracing a model.

    Args:
        axes: The prunable axes: hidden, then each layer's heads and ffn, then vocabulary.
        left_out: `parameter[dimension]` -> reason why no unit of it can be removed.
        joined: An ffn axis of each layer that has several feed-forward networks of one width, as MobileBERT: a unit is
            one of each network. Networks aren't coupled, so only a class with one width for all needs these axes.
        projections: The coordinates of weights that belong to the heads of each layer's attention.
    """

    axes: tuple[Axis, ...]
    left_out: Mapping[str, str]
    joined: tuple[Axis, ...] = ()
    projections: tuple[AttentionProjection, ...] = ()

    def select_layers(self, stack: str, layers: Sequence[int]) -> "Traced":
        """Returns what was traced in a model of the layers numbered `layers`, in that order, under its new names."""

        def rename(axes: Sequence[Axis]) -> tuple[Axis, ...]:
            return tuple(axis for each in axes if (axis := rename_axis(each, stack, layers)) is not None)

        left_out = {
            f"{new}[{suffix}": reason
            for (name, _, suffix), reason in ((key.rpartition("["), why) for key, why in self.left_out.items())
            if (new := rename_layer(name, stack, layers)) is not None
        }
        projections = tuple(
            replace(each, parameter=new)
            for each in self.projections
            if (new := rename_layer(each.parameter, stack, layers)) is not None
        )
        return Traced(rename(self.axes), left_out, rename(self.joined), projections)


def rename_axis(axis: Axis, stack: str, layers: Sequence[int]) -> Axis | None:
    """Returns an axis in a model of the layers numbered `layers`; None if it belongs to another layer."""
    if axis.layer is not None and axis.layer not in layers:
        return None
    slots = tuple(
        replace(slot, parameter=new)
        for slot in axis.slots
        if (new := rename_layer(slot.parameter, stack, layers)) is not None
    )
    if axis.layer is None:
        return replace(axis, slots=slots)
    layer = layers.index(axis.layer)
    return replace(axis, name=f"layers.{layer}.{axis.kind}", layer=layer, slots=slots)


def find_axes(model: PreTrainedModel, example: Mapping[str, Tensor] | None = None) -> list[Axis]:
    """Returns the prunable axes of a model.

    A label for each dimension of each tensor is followed through the graph of torch.export; labels that must agree are
    unified, such as a linear layer's columns with its input. Dimensions that reach an unknown operator are left out.
    The inner width of a classifier or a masked-LM head, if it equals the width of the residual stream, is pruned
    together with `hidden`, since the stock classes build both from `hidden_size`. An axis of one unit isn't listed.

    Args:
        model: Any transformer whose layers are in one ModuleList.
        example: Inputs by name, [batch, length]; by default two rows of seven ids.

    Raises:
        InputError: The model can't be traced, its layers aren't in one list, or nothing but the vocabulary can be
            pruned.

    Source: coupled parameters by their dependency graph follow Fang et al. (2023), DepGraph, arXiv 2301.12900; here the
        graph is of dimensions and not of layers.
    """
    traced = trace(model, example)
    if all(axis.kind == "vocabulary" for axis in traced.axes):
        raise InputError(
            f"{model.config.model_type}: expected heads, feed-forward units or hidden coordinates that can be removed, "
            f"found none in {type(model).__name__}: nothing can be pruned; reasons: "
            f"{sorted(set(traced.left_out.values()))[:5]}"
        )
    return list(traced.axes)


def trace(model: PreTrainedModel, example: Mapping[str, Tensor] | None = None) -> Traced:
    """Returns the axes as `find_axes` does, with the reasons for the dimensions left out.

    Layers with weights of the same names and shapes are traced once, on a copy without storage, see
    `build_reduced_copy`.

    Raises:
        InputError: The model can't be traced, or its layers aren't in one list.
    """
    stack = find_layer_stack(model)
    reduced = build_reduced_copy(model, stack)
    if any(len(group) > 1 for group in reduced.layers):
        with suppress(InputError):  # a model whose code needs all of its layers
            return expand_to_all_layers(trace_whole(reduced.model, example), model, stack, reduced)
    return trace_whole(model, example)


def trace_whole(model: PreTrainedModel, example: Mapping[str, Tensor] | None = None) -> Traced:
    """Returns the result of tracing every layer of a model."""
    stack = find_layer_stack(model)
    labels = Labels()
    dimensions = {first: tuple(map(labels.dimension, tensor.shape)) for first, tensor in model.named_parameters()}
    aliases = {name: first for first, group in group_aliases(model).items() for name in group}
    parameters = {name: dimensions[first] for name, first in aliases.items()}
    embedding, head = find_vocabulary_weights(model)
    propagator = LabelPropagator(labels, aliases[embedding])
    program = export_graph(model, example)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            propagator.values[node] = label_placeholder(node, program, labels, dimensions, aliases)
        elif node.op == "call_function":
            propagator.follow(node)
    if head is not None and labels.size(parameters[head][0]) == labels.size(parameters[embedding][0]):
        labels.unify(parameters[embedding][0], parameters[head][0], "the LM head's rows differ")
    classifier = AxisClassifier(stack, labels, parameters, collect_roles(model, aliases, propagator.uses), embedding)
    axes, joined = classifier.classify()
    projections = ProjectionFinder(labels, propagator.values, dimensions).find(program.graph)
    return Traced(tuple(axes), classifier.explain_rest(axes), tuple(joined), projections)


def group_aliases(model: nn.Module) -> dict[str, list[str]]:
    """Returns first name -> all names of a parameter; tied weights have more than one."""
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        groups[first[id(tensor)]].append(name)
    return groups


def find_vocabulary_weights(model: PreTrainedModel) -> tuple[str, str | None]:
    """Returns the names of the token embedding and of the LM head's weight, None for a model without an LM head."""
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return first[id(model.get_input_embeddings().weight)], None if weight is None else first[id(weight)]


def label_placeholder(
    node: torch.fx.Node,
    program: torch.export.ExportedProgram,
    labels: Labels,
    dimensions: Mapping[str, tuple[Dimension, ...]],
    aliases: Mapping[str, str],
) -> LabelledTensor | None:
    """Returns the labels of a parameter, or blocked labels for any other tensor input of the graph."""
    name = program.graph_signature.inputs_to_parameters.get(node.name)
    if name is not None:
        first = aliases[name.removeprefix("model.")]
        return LabelledTensor(dimensions[first], (first, tuple(range(len(dimensions[first])))))
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor):
        return None
    why = "it belongs to an input or to a constant, such as the angles of rotary positions"
    return LabelledTensor(tuple(labels.dimension(int(size), why) for size in tensor.shape))


def collect_roles(model: nn.Module, aliases: Mapping[str, str], uses: Iterable[Use]) -> dict[tuple[str, int], Role]:
    """Returns (name, dimension) -> role; of tied weights, the name in an nn.Embedding gets the embedding's role."""
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    by_parameter: dict[str, list[Use]] = defaultdict(list)
    for use in uses:
        by_parameter[use.parameter].append(use)
    roles: dict[tuple[str, int], Role] = {}
    for name, first in aliases.items():
        is_table = name.rpartition(".")[0] in tables
        for use in by_parameter[first]:
            key = (name, use.dimension)
            if key not in roles or is_table == (use.operator == "embedding"):
                roles[key] = use.role
    return roles


def expand_to_all_layers(traced: Traced, model: PreTrainedModel, stack: str, reduced: ReducedCopy) -> Traced:
    """Returns the result for all layers of the model, given the result for its reduced copy."""
    order = {name: i for i, name in enumerate(n for group in group_aliases(model).values() for n in group)}

    def list_layer_names(name: str) -> dict[int, str]:
        """Returns layer -> name of the parameters that a layer of the copy represents; outside layers itself at -1."""
        copy_layer = find_layer(name, stack)
        if copy_layer is None:
            return {-1: name}
        rest = name.removeprefix(f"{stack}.{copy_layer}.")
        return {layer: f"{stack}.{layer}.{rest}" for layer in reduced.layers[copy_layer]}

    def spread(slots: Sequence[Slot]) -> tuple[Slot, ...]:
        copies = [replace(slot, parameter=name) for slot in slots for name in list_layer_names(slot.parameter).values()]
        return tuple(sorted(copies, key=lambda slot: order[slot.parameter]))

    def copy_axis(axis: Axis) -> list[Axis]:
        if axis.layer is None:
            return [replace(axis, slots=spread(axis.slots))]
        return [
            replace(
                axis,
                name=f"layers.{layer}.{axis.kind}",
                layer=layer,
                slots=tuple(replace(slot, parameter=list_layer_names(slot.parameter)[layer]) for slot in axis.slots),
            )
            for layer in reduced.layers[axis.layer]
        ]

    def copy_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
        copies = [each for axis in axes for each in copy_axis(axis)]
        places = {"hidden": -1, "vocabulary": len(order)}
        return tuple(sorted(copies, key=lambda axis: (places.get(axis.kind, axis.layer or 0), axis.kind == "ffn")))

    left_out = {
        f"{copied}[{suffix}": reason
        for name, _, suffix, reason in ((*each.rpartition("["), why) for each, why in traced.left_out.items())
        for copied in list_layer_names(name).values()
    }
    projections = tuple(
        replace(each, parameter=name)
        for each in traced.projections
        for name in list_layer_names(each.parameter).values()
    )
    return Traced(copy_axes(traced.axes), left_out, copy_axes(traced.joined), projections)
