"""The effect of each operator of a traced model on the labels of its tensors' dimensions.

The graph is from torch.export, in which linear, layer_norm, embedding, scaled_dot_product_attention, view and transpose
aren't decomposed. An unknown operator blocks every dimension of its inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from compress.prune.tracing.axes import Role
from compress.prune.tracing.labels import Dimension, Labels
from compress.prune.tracing.reshaping import (
    Reshaping,
    UnsupportedArgumentsError,
    Value,
    get_argument,
    operator,
    shape,
    tensors,
)

SAME_SHAPE = {"to", "_to_copy", "contiguous", "clone", "dropout", "dropout_", "alias", "detach", "type_as", "float"}


@dataclass(frozen=True)
class Use:
    """The use of a parameter's dimension by an operator."""

    parameter: str
    dimension: int
    operator: str
    role: Role


class Follower(Reshaping):
    """Propagates labels through a graph, operator by operator.

    Args:
        labels: The store of all labels.
        vocabulary: Name of the weight whose rows are looked up by token ids.
    """

    def __init__(self, labels: Labels, vocabulary: str) -> None:
        super().__init__(labels)
        self.vocabulary = vocabulary
        self.uses: list[Use] = []

    def follow(self, node: Node) -> None:
        """Labels the result of a node, one tensor or several."""
        if node.target is getitem:
            source, place = get_argument(node, 0, None), get_argument(node, 1, None)
            self.values[node] = self.values[source][place]
        elif tensors(node.meta.get("val")):
            try:
                self.values[node] = (self.rule_of(node) or self.unknown)(node)
            except UnsupportedArgumentsError:
                self.values[node] = self.unknown(node)

    def rule_of(self, node: Node) -> Callable[[Node], Any] | None:
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return self.pointwise if pointwise or operator(node) in SAME_SHAPE else self.rule(operator(node))

    def unknown(self, node: Node) -> Any:
        """Blocks all dimensions of a node's inputs and results."""
        why = f"{node.target} is an operator that pruning doesn't understand"
        for argument in node.all_input_nodes:
            held = self.values.get(argument)
            for value in held if isinstance(held, list) else [held]:
                for dimension in value.dimensions if value else ():
                    self.labels.block(dimension, why)
        made = node.meta["val"]
        several = made if isinstance(made, list | tuple) else [made]
        fresh = [Value(tuple(self.labels.dimension(int(size), why) for size in tensor.shape)) for tensor in several]
        return fresh if isinstance(made, list | tuple) else fresh[0]

    def use(self, value: Value, dimension: int, node: Node, role: Role) -> None:
        """Records the role of a dimension of `value` if `value` is a parameter."""
        if value.weight is not None:
            name, numbers = value.weight
            self.uses.append(Use(name, numbers[dimension], operator(node), role))

    def pointwise(self, node: Node) -> Value:
        inputs = [value for argument in node.args if isinstance(value := self.values.get(argument), Value)]  # type: ignore[arg-type]
        if len(inputs) == 1 and len(inputs[0].dimensions) == len(shape(node)):
            return inputs[0]
        role: Role = "scale" if operator(node).rstrip("_") in ("mul", "div") else "out"
        for value in inputs:
            for d in range(len(value.dimensions)):
                self.use(value, d, node, role)
        return Value(self.broadcast([value.dimensions for value in inputs], len(shape(node))))

    def on_linear(self, node: Node) -> Value:
        return self.product(node, self.value(node.args[0]), self.value(node.args[1]), (1, 0), self.optional(node, 2))

    def on_addmm(self, node: Node) -> Value:
        bias, value, weight = (self.value(argument) for argument in node.args)
        return self.product(node, value, weight, (0, 1), bias)

    def product(self, node: Node, value: Value, weight: Value, order: tuple[int, int], bias: Value | None) -> Value:
        """Labels value [..., in] times a weight, whose dimensions `order` are in and out, plus bias [out]."""
        if weight.weight is None:
            raise UnsupportedArgumentsError
        inside, outside = (weight.dimensions[d] for d in order)
        self.labels.unify(value.dimensions[-1], inside, "it meets a weight cut up differently")
        self.use(weight, order[0], node, "in")
        self.use(weight, order[1], node, "out")
        if bias is not None:
            self.labels.unify(outside, bias.dimensions[-1], "its bias is cut up differently")
            self.use(bias, len(bias.dimensions) - 1, node, "out")
        return Value((*value.dimensions[:-1], outside))

    def on_matmul(self, node: Node) -> Value:
        left, right = self.value(node.args[0]), self.value(node.args[1])
        if right.weight is not None and len(right.dimensions) == 2:
            return self.product(node, left, right, (0, 1), None)
        if left.weight or right.weight or min(len(left.dimensions), len(right.dimensions)) < 3:
            raise UnsupportedArgumentsError
        why = "two activations are multiplied along it, as along the width of a head"
        self.labels.unify(left.dimensions[-1], right.dimensions[-2], why)
        for dimension in (*left.dimensions[-2:], *right.dimensions[-2:]):
            self.labels.block(dimension, why)
        maps = self.broadcast([left.dimensions[:-2], right.dimensions[:-2]], len(shape(node)) - 2)
        self.attend(maps)
        return Value((*maps, left.dimensions[-2], right.dimensions[-1]))

    on_mm = on_bmm = on_matmul

    def on_scaled_dot_product_attention(self, node: Node) -> Value:
        query, key, value = (self.value(argument) for argument in node.args[:3])
        why = "queries and keys are cut up differently"
        maps = self.broadcast([key.dimensions[:-2], value.dimensions[:-2]], len(key.dimensions) - 2)
        queries, keys = (shape(source) for source in node.all_input_nodes[:2])
        for d, (ours, theirs) in enumerate(zip(query.dimensions[:-2], maps, strict=True)):
            if queries[d] == keys[d]:
                self.labels.unify(ours, theirs, why)
            elif (
                halves := self.labels.split(ours, keys[d])
            ) is not None:  # enable_gqa: each key head serves several query heads
                self.labels.unify(halves[0], theirs, why)
                self.labels.block(halves[1], "the queries of one key-value head stay together")
            else:
                self.labels.block((*ours, *theirs), why)
        self.labels.unify(query.dimensions[-1], key.dimensions[-1], why)
        for dimension in (query.dimensions[-1], value.dimensions[-1]):
            self.labels.block(dimension, "it's the width of a head")
        if mask := self.optional(node, 3):
            self.broadcast([query.dimensions[:-2], mask.dimensions[:-2]], len(query.dimensions) - 2)
        self.attend(query.dimensions[:-2])
        return Value((*query.dimensions[:-1], value.dimensions[-1]))

    def attend(self, maps: tuple[Dimension, ...]) -> None:
        for dimension in maps:
            for label in self.labels.labels(dimension):
                label.attends = True

    def on_embedding(self, node: Node) -> Value:
        weight, ids = self.value(node.args[0]), self.value(node.args[1])
        self.use(weight, 0, node, "in")
        self.use(weight, 1, node, "out")
        if weight.weight is None or weight.weight[0] != self.vocabulary:
            self.labels.block(weight.dimensions[0], "its rows are looked up by something other than token ids")
        return Value((*ids.dimensions, weight.dimensions[1]))

    def on_layer_norm(self, node: Node) -> Value:
        value = self.value(node.args[0])
        if len(get_argument(node, 1, ())) != 1:
            raise UnsupportedArgumentsError
        self.norm(value.dimensions[-1])
        for i in (2, 3) if operator(node) == "layer_norm" else (2,):
            if weight := self.optional(node, i):
                self.labels.unify(value.dimensions[-1], weight.dimensions[0], "a norm's weight is cut up differently")
                self.use(weight, 0, node, "scale")
        return Value(value.dimensions)

    on_rms_norm = on_layer_norm

    def on_softmax(self, node: Node) -> Value:
        value = self.value(node.args[0])
        self.labels.block(value.dimensions[get_argument(node, 1, -1)], "a softmax runs over it")
        return Value(value.dimensions)
