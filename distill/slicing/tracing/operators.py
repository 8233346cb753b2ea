"""The effect of each operator of a traced model on the labels of its tensors' dimensions.

The graph is from torch.export, in which linear, layer_norm, embedding, scaled_dot_product_attention, view and transpose
aren't decomposed. An unknown operator blocks every dimension of its inputs.
"""

from dataclasses import dataclass
from operator import getitem

import torch
from torch.fx import Node

from distill.slicing.tracing.axes import Role
from distill.slicing.tracing.labels import Dimension, Labels
from distill.slicing.tracing.reshaping import (
    LabelledTensor,
    Reshaping,
    UnsupportedArgumentsError,
    _Rule,
    get_argument,
    is_tensors,
    name_operator,
    read_node_shape,
)

SAME_SHAPE = {"to", "_to_copy", "contiguous", "clone", "dropout", "dropout_", "alias", "detach", "type_as", "float"}
POINTWISE = {"masked_fill_"}  # without torch's tag
FILLED = {"zeros_like", "ones_like", "full_like"}  # one number at all coordinates, whichever are removed


@dataclass(frozen=True)
class Use:
    """The use of a parameter's dimension by an operator."""

    parameter: str
    dimension: int
    operator: str
    role: Role


class LabelPropagator(Reshaping):
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
            source, index = node.args[:2]
            values = self.values[source] if isinstance(source, Node) else None
            self.values[node] = values[index] if isinstance(values, list) and isinstance(index, int) else None
        elif is_tensors(node.meta.get("val")):
            uses = len(self.uses)
            try:
                self.values[node] = (self.choose_rule(node) or self.follow_unknown)(node)
            except UnsupportedArgumentsError:
                self.values[node] = self.follow_unknown(node)
            self.record_activations(node, {use.parameter for use in self.uses[uses:]})

    def choose_rule(self, node: Node) -> _Rule | None:
        """Returns the rule for a node, None if its operator is unknown."""
        name = name_operator(node)
        if name in SAME_SHAPE | FILLED:
            return self.on_same_shape
        is_pointwise = name in POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
        return self.on_pointwise if is_pointwise else self.find_rule(name)

    def follow_unknown(self, node: Node) -> LabelledTensor | list[LabelledTensor]:
        """Blocks all dimensions of a node's inputs and results."""
        why = f"{node.target} is an operator that tracing doesn't support"
        for argument in node.all_input_nodes:
            values = self.values.get(argument)
            for value in values if isinstance(values, list) else [values]:
                for dimension in value.dimensions if value else ():
                    self.labels.block(dimension, why)
        result = node.meta["val"]
        several = result if isinstance(result, list | tuple) else [result]
        values = [
            LabelledTensor(tuple(self.labels.dimension(int(size), why) for size in tensor.shape)) for tensor in several
        ]
        return values if isinstance(result, list | tuple) else values[0]

    def record_activations(self, node: Node, recorded: set[str]) -> None:
        """Records that a parameter produces its coordinates where it is an activation itself.

        An example is a table of relative positions, of which a slice or the norm is the input of a layer.
        """
        results = self.values[node]
        propagated = {
            each.weight[0] for each in (results if isinstance(results, list) else [results]) if each and each.weight
        }
        for argument in node.all_input_nodes:
            value = self.values.get(argument)
            if isinstance(value, LabelledTensor) and value.weight and value.weight[0] not in recorded | propagated:
                for d in range(len(value.dimensions)):
                    self.record_use(value, d, node, "out")

    def record_use(self, value: LabelledTensor, dimension: int, node: Node, role: Role) -> None:
        """Records the role of a dimension of `value` if `value` is a parameter."""
        if value.weight is not None:
            name, numbers = value.weight
            self.uses.append(Use(name, numbers[dimension], name_operator(node), role))

    def on_same_shape(self, node: Node) -> LabelledTensor:
        """Returns the labels of the first argument; others only determine the dtype."""
        value = self.read_value(node.args[0])
        return LabelledTensor(value.dimensions) if name_operator(node) in FILLED else value

    def on_pointwise(self, node: Node) -> LabelledTensor:
        """Unifies the inputs' dimensions."""
        values = [self.values.get(argument) for argument in node.args if isinstance(argument, Node)]
        inputs = [value for value in values if isinstance(value, LabelledTensor)]
        if len(inputs) == 1 and len(inputs[0].dimensions) == len(read_node_shape(node)):
            return inputs[0]
        role: Role = "scale" if name_operator(node).rstrip("_") in ("mul", "div") else "out"
        for value in inputs:
            for d in range(len(value.dimensions)):
                self.record_use(value, d, node, role)
        return LabelledTensor(self.broadcast([value.dimensions for value in inputs], len(read_node_shape(node))))

    def on_linear(self, node: Node) -> LabelledTensor:
        """Follows a product with a weight [out, in]."""
        return self.follow_product(
            node, self.read_value(node.args[0]), self.read_value(node.args[1]), (1, 0), self.optional_value(node, 2)
        )

    def on_addmm(self, node: Node) -> LabelledTensor:
        """Follows a product with a weight [in, out]."""
        bias, value, weight = (self.read_value(argument) for argument in node.args)
        return self.follow_product(node, value, weight, (0, 1), bias)

    def follow_product(
        self,
        node: Node,
        value: LabelledTensor,
        weight: LabelledTensor,
        order: tuple[int, int],
        bias: LabelledTensor | None,
    ) -> LabelledTensor:
        """Labels value [..., in] times a weight, whose dimensions `order` are in and out, plus bias [out]."""
        if weight.weight is None:
            raise UnsupportedArgumentsError
        inside, outside = (weight.dimensions[d] for d in order)
        self.labels.unify(value.dimensions[-1], inside, "it meets a weight that is divided differently")
        self.record_use(weight, order[0], node, "in")
        self.record_use(weight, order[1], node, "out")
        if bias is not None:
            self.labels.unify(outside, bias.dimensions[-1], "its bias is divided differently")
            self.record_use(bias, len(bias.dimensions) - 1, node, "out")
        return LabelledTensor((*value.dimensions[:-1], outside))

    def on_matmul(self, node: Node) -> LabelledTensor:
        """Follows a product with a weight [in, out], or of two activations, as in attention."""
        left, right = self.read_value(node.args[0]), self.read_value(node.args[1])
        if right.weight is not None and len(right.dimensions) == 2:
            return self.follow_product(node, left, right, (0, 1), None)
        if left.weight or right.weight or min(len(left.dimensions), len(right.dimensions)) < 3:
            raise UnsupportedArgumentsError
        why = "two activations are multiplied along it, as along the width of a head"
        self.labels.unify(left.dimensions[-1], right.dimensions[-2], why)
        for dimension in (*left.dimensions[-2:], *right.dimensions[-2:]):
            self.labels.block(dimension, why)
        maps = self.broadcast([left.dimensions[:-2], right.dimensions[:-2]], len(read_node_shape(node)) - 2)
        self.mark_attending(maps)
        return LabelledTensor((*maps, left.dimensions[-2], right.dimensions[-1]))

    on_mm = on_bmm = on_matmul

    def on_scaled_dot_product_attention(self, node: Node) -> LabelledTensor:
        """Unifies the heads of queries, keys and values, and blocks their widths."""
        query, key, value = (self.read_value(argument) for argument in node.args[:3])
        why = "queries and keys are divided differently"
        maps = self.broadcast([key.dimensions[:-2], value.dimensions[:-2]], len(key.dimensions) - 2)
        queries, keys = (read_node_shape(source) for source in node.all_input_nodes[:2])
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
        if mask := self.optional_value(node, 3):
            self.broadcast([query.dimensions[:-2], mask.dimensions[:-2]], len(query.dimensions) - 2)
        self.mark_attending(query.dimensions[:-2])
        return LabelledTensor((*query.dimensions[:-1], value.dimensions[-1]))

    def mark_attending(self, maps: tuple[Dimension, ...]) -> None:
        """Marks the labels as dimensions of attention maps."""
        for dimension in maps:
            for label in self.labels.labels(dimension):
                label.attends = True

    def on_embedding(self, node: Node) -> LabelledTensor:
        """Follows a look-up of rows."""
        weight, ids = self.read_value(node.args[0]), self.read_value(node.args[1])
        self.record_use(weight, 0, node, "in")
        self.record_use(weight, 1, node, "out")
        if weight.weight is None or weight.weight[0] != self.vocabulary:
            self.labels.block(weight.dimensions[0], "its rows are looked up by something other than token ids")
        return LabelledTensor((*ids.dimensions, weight.dimensions[1]))

    def on_layer_norm(self, node: Node) -> LabelledTensor:
        """Marks the last dimension and unifies it with the norm's weights."""
        value = self.read_value(node.args[0])
        if len(get_argument(node, 1, ())) != 1:
            raise UnsupportedArgumentsError
        self.mark_normed(value.dimensions[-1])
        for i in (2, 3) if name_operator(node) == "layer_norm" else (2,):
            if weight := self.optional_value(node, i):
                self.labels.unify(value.dimensions[-1], weight.dimensions[0], "a norm's weight is divided differently")
                self.record_use(weight, 0, node, "scale")
        return LabelledTensor(value.dimensions)

    on_rms_norm = on_layer_norm

    def on_conv1d(self, node: Node) -> LabelledTensor:
        """Follows a convolution of value [..., in, length] with a weight [out, in, kernel] and a bias [out]."""
        value, weight, bias = self.read_value(node.args[0]), self.read_value(node.args[1]), self.optional_value(node, 2)
        if weight.weight is None or get_argument(node, 6, 1) != 1 or read_node_shape(node)[-1] != self.size(value, -1):
            raise UnsupportedArgumentsError
        self.labels.block(weight.dimensions[2], "it's the kernel of a convolution")
        channels = LabelledTensor((*value.dimensions[:-2], value.dimensions[-1], value.dimensions[-2]))
        result = self.follow_product(node, channels, weight, (1, 0), bias).dimensions
        return LabelledTensor((*result[:-2], result[-1], result[-2]))

    def size(self, value: LabelledTensor, d: int) -> int:
        """Returns the size of a dimension."""
        return self.labels.size(self.labels.resolve(value.dimensions[d]))

    def on_softmax(self, node: Node) -> LabelledTensor:
        """Blocks the dimension that it runs over."""
        value = self.read_value(node.args[0])
        self.labels.block(value.dimensions[get_argument(node, 1, -1)], "a softmax runs over it")
        return LabelledTensor(value.dimensions)
