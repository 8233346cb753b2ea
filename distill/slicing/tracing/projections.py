"""Detection of the weights that make an attention's queries, keys and values, and of those that take its output."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Literal

import torch
from torch.fx import Node

from distill.slicing.tracing.labels import Dimension, Labels
from distill.slicing.tracing.reshaping import (
    SPLITTING_OPERATIONS,
    LabelledTensor,
    Values,
    get_argument,
    is_tensors,
    name_operator,
    read_node_shape,
)

ProjectionRole = Literal["query", "key", "value", "output"]
OTHER: dict[ProjectionRole, ProjectionRole] = {"query": "key", "key": "query"}


@dataclass(frozen=True)
class AttentionProjection:
    """The coordinates of a weight's or bias's dimension that belong to the heads of an attention: heads x head width.

    Args:
        parameter: Name in the model's state_dict.
        dim: Dimension of the parameter.
        start, size: The coordinates; a fused weight has several projections in one dimension.
        part: What they are: the attention's queries, keys or values, or its output as the input of a layer.
    """

    parameter: str
    dim: int
    start: int
    size: int
    part: ProjectionRole


@dataclass(frozen=True)
class ActivationOrigin:
    """The origin of an activation: coordinates `start` to `start + size` of what (parameter, dimension) produce."""

    places: tuple[tuple[str, int], ...]
    start: int
    size: int


class AttentionOutput:
    """The origin of an activation that an attention returned."""


Origin = ActivationOrigin | AttentionOutput | None


class ProjectionFinder:
    """Follows activations from the weights that produce them to an attention, and from there to the next weight.

    Args:
        labels, values: The labels of the graph's tensors.
        parameters: Name -> labelled dimensions of each parameter.
    """

    def __init__(self, labels: Labels, values: Values, parameters: Mapping[str, tuple[Dimension, ...]]) -> None:
        self.labels, self.values, self.parameters = labels, values, parameters
        self.origins: dict[Node, Origin | list[Origin]] = {}
        self.parts: dict[ActivationOrigin, ProjectionRole] = {}
        self.projections: dict[AttentionProjection, None] = {}  # in the order of the graph, each once

    def find(self, graph: torch.fx.Graph) -> tuple[AttentionProjection, ...]:
        """Returns the projections of all attentions in the graph."""
        for node in graph.nodes:
            if node.op == "call_function" and (node.target is getitem or is_tensors(node.meta.get("val"))):
                self.origins[node] = self.trace_origin(node)
        return tuple(self.projections)

    def trace_origin(self, node: Node) -> Origin | list[Origin]:
        """Returns the origin of a node's result, or of each of its results."""
        name = name_operator(node)
        if node.target is getitem:
            source, index = node.args[:2]
            origins = self.origins.get(source) if isinstance(source, Node) else None
            return origins[index] if isinstance(origins, list) and isinstance(index, int) else None
        if name == "scaled_dot_product_attention":
            self.record_scores(*(self.find_origin(argument) for argument in node.args[:2]))
            return self.record_values(self.find_origin(node.args[2]))
        if name == "linear":
            return self.trace_product(node, node.args[0], node.args[1], get_argument(node, 2, None), (1, 0))
        if name == "addmm":
            return self.trace_product(node, node.args[1], node.args[2], node.args[0], (0, 1))
        if name in ("matmul", "mm", "bmm"):
            return self.trace_product(node, node.args[0], node.args[1], None, (0, 1))
        if name in SPLITTING_OPERATIONS or name == "unbind":
            return self.trace_parts(node, name)
        if name in ("select", "slice"):
            return self.trace_part(node, name)
        origins = [self.find_origin(argument) for argument in node.all_input_nodes]
        distinct = {origin for origin in origins if origin is not None}
        return distinct.pop() if len(distinct) == 1 else None

    def find_origin(self, argument: object) -> Origin:
        """Returns the origin of a node's argument."""
        origin = self.origins.get(argument) if isinstance(argument, Node) else None
        return None if isinstance(origin, list) else origin

    def trace_product(self, node: Node, source: object, weight: object, bias: object, order: tuple[int, int]) -> Origin:
        """Returns the origin of a product with a weight, whose dimensions `order` are in and out, or of activations."""
        parameter = self.find_parameter(weight)
        origin = self.find_origin(source)
        if parameter is None:
            return self.trace_activations(origin, self.find_origin(weight))
        name, dimensions = parameter
        size = read_node_shape(node)[-1]
        if isinstance(origin, AttentionOutput) and isinstance(source, Node):
            self.record(ActivationOrigin(((name, dimensions[order[0]]),), 0, read_node_shape(source)[-1]), "output")
        vector = self.find_parameter(bias)
        places = ((name, dimensions[order[1]]), *([(vector[0], vector[1][0])] if vector else []))
        return ActivationOrigin(places, 0, size)

    def find_parameter(self, argument: object) -> tuple[str, tuple[int, ...]] | None:
        """Returns the name of a parameter and its dimensions in the argument's order; None for another tensor."""
        value = self.values.get(argument) if isinstance(argument, Node) else None
        return value.weight if isinstance(value, LabelledTensor) else None

    def trace_activations(self, left: Origin, right: Origin) -> Origin:
        """Returns the origin of a product of activations: scores of queries and keys, or of scores and values."""
        if isinstance(left, ActivationOrigin) and isinstance(right, ActivationOrigin):
            self.record_scores(left, right)
            return None
        return self.record_values(right)

    def record_scores(self, left: Origin, right: Origin) -> None:
        """Records queries and keys: the first product of a layer has its queries on the left, others may be swapped."""
        if isinstance(left, ActivationOrigin) and isinstance(right, ActivationOrigin):
            part = self.parts.get(left) or OTHER.get(self.parts.get(right, "key"), "query")
            self.record(left, part)
            self.record(right, OTHER.get(part, "key"))

    def record_values(self, origin: Origin) -> Origin:
        """Records values and returns the origin of the attention's output."""
        if not isinstance(origin, ActivationOrigin):
            return None
        self.record(origin, "value")
        return AttentionOutput()

    def record(self, rows: ActivationOrigin, part: ProjectionRole) -> None:
        """Records the part of an attention that the rows are."""
        self.parts.setdefault(rows, part)
        for name, dim in rows.places:
            self.projections[AttentionProjection(name, dim, rows.start, rows.size, part)] = None

    def trace_parts(self, node: Node, name: str) -> list[Origin]:
        """Returns the origin of each part of a split."""
        d = get_argument(node, 1 if name == "unbind" else 2, 0) % len(read_node_shape(node.all_input_nodes[0]))
        results = node.meta["val"]
        sizes = [1 if name == "unbind" else int(tensor.shape[d]) for tensor in results]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.divide(node.all_input_nodes[0], d, start, size) for start, size in zip(starts, sizes, strict=True)]

    def trace_part(self, node: Node, name: str) -> Origin:
        """Returns the origin of a slice or of one position."""
        source = node.all_input_nodes[0]
        d = get_argument(node, 1, 0) % len(read_node_shape(source))
        whole = read_node_shape(source)[d]
        start = (get_argument(node, 2, None) or 0) % whole
        return self.divide(source, d, start, 1 if name == "select" else read_node_shape(node)[d])

    def divide(self, source: Node, d: int, start: int, size: int) -> Origin:
        """Returns the origin of positions of dimension `d`: a block of rows if it's the outermost that has any."""
        origin, value = self.find_origin(source), self.values.get(source)
        whole = read_node_shape(source)[d]
        if whole == size or not isinstance(origin, ActivationOrigin) or not isinstance(value, LabelledTensor):
            return origin
        name, dim = origin.places[0]
        row_labels = set(self.labels.resolve(self.parameters[name][dim]))
        with_rows = [i for i, each in enumerate(value.dimensions) if row_labels & set(self.labels.resolve(each))]
        if d not in with_rows:
            return origin  # positions of the batch or of its texts
        if with_rows[0] != d or origin.size % whole:
            return None
        step = origin.size // whole
        return ActivationOrigin(origin.places, origin.start + start * step, size * step)
