"""The effect of operators that only move or reduce coordinates on labels: views, swaps, splits, joins, reductions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from distill.slicing.tracing.labels import Dimension, Labels

VIEWS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"}
SWAPS = {"transpose", "permute", "t", "numpy_T", "swapaxes", "mT"}
REDUCTIONS = {"mean", "sum", "var", "amax", "amin"}
SPLITTING_OPERATIONS = {"split", "split_with_sizes", "chunk"}


@dataclass(frozen=True)
class LabelledTensor:
    """The labelled dimensions of a tensor.

    Args:
        dimensions: The labels of each dimension.
        weight: For a parameter, its name and the parameter's dimension index of each dimension; None for other tensors.
    """

    dimensions: tuple[Dimension, ...]
    weight: tuple[str, tuple[int, ...]] | None = None


Values = dict[Node, LabelledTensor | list[LabelledTensor] | None]  # None for a result that isn't a tensor


class UnsupportedArgumentsError(Exception):
    """The arguments of an operator aren't covered by any rule."""


_Rule = Callable[[Node], LabelledTensor | list[LabelledTensor]]


class Reshaping:
    """Rules for operators that move, join or reduce coordinates; each takes a node and returns its labelled result."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.values: Values = {}

    def find_rule(self, name: str) -> _Rule | None:
        """Returns the rule for an operator, None if there is none."""
        groups: tuple[tuple[set[str], _Rule], ...] = (
            (VIEWS, self.on_view),
            (SWAPS, self.on_swap),
            (SPLITTING_OPERATIONS, self.on_parts),
            (REDUCTIONS, self.on_reduction),
        )
        return next((rule for names, rule in groups if name in names), getattr(self, f"on_{name}", None))

    def read_value(self, argument: Any) -> LabelledTensor:
        """Returns the labels of an argument that must be a tensor."""
        value = self.values.get(argument) if isinstance(argument, Node) else None
        if not isinstance(value, LabelledTensor):
            raise UnsupportedArgumentsError
        return value

    def optional_value(self, node: Node, i: int) -> LabelledTensor | None:
        """Returns the labels of an argument that may be None or missing."""
        argument = get_argument(node, i, None)
        return None if argument is None else self.read_value(argument)

    def broadcast(self, inputs: Sequence[tuple[Dimension, ...]], count: int) -> tuple[Dimension, ...]:
        """Unifies the dimensions of broadcast tensors, aligned at the last; size 1 adopts the labels of the other."""
        result: list[Dimension] = [()] * count
        for dimensions in inputs:
            for back in range(1, len(dimensions) + 1):
                if dimensions[-back] and result[-back]:
                    self.labels.unify(
                        result[-back], dimensions[-back], "it meets a dimension that is divided differently"
                    )
                result[-back] = result[-back] or dimensions[-back]
        return tuple(result)

    def on_view(self, node: Node) -> LabelledTensor:
        """Regroups the dimensions' labels by the sizes of the result."""
        dimensions = self.read_value(node.args[0]).dimensions
        return LabelledTensor(
            tuple(self.labels.reshape(dimensions, read_node_shape(node), "a view cuts across its units"))
        )

    def on_swap(self, node: Node) -> LabelledTensor:
        """Reorders the dimensions."""
        value = self.read_value(node.args[0])
        count = len(value.dimensions)
        order = list(range(count))
        if name_operator(node) == "permute":
            order = [d % count for d in get_argument(node, 1, ())]
        elif name_operator(node) == "numpy_T":
            order.reverse()
        elif count > 1:
            a, b = get_argument(node, 1, -2), get_argument(node, 2, -1)
            order[a], order[b] = order[b], order[a]
        weight = (value.weight[0], tuple(value.weight[1][d] for d in order)) if value.weight else None
        return LabelledTensor(tuple(value.dimensions[d] for d in order), weight)

    def on_reduction(self, node: Node) -> LabelledTensor:
        """Drops the reduced dimensions and marks their labels."""
        value = self.read_value(node.args[0])
        count = len(value.dimensions)
        axes = get_argument(node, 1, None)
        reduced = {d % count for d in ([axes] if isinstance(axes, int) else axes or range(count))}
        for d in reduced:
            self.mark_normed(value.dimensions[d])
        if len(read_node_shape(node)) == count:
            return LabelledTensor(tuple(() if d in reduced else known for d, known in enumerate(value.dimensions)))
        return LabelledTensor(tuple(known for d, known in enumerate(value.dimensions) if d not in reduced))

    def mark_normed(self, dimension: Dimension) -> None:
        """Marks the labels as reduced over by a mean, sum or norm."""
        for label in self.labels.labels(dimension):
            label.normed = True

    def on_expand(self, node: Node) -> LabelledTensor:
        """Blocks the repeated dimensions, except of masks, which are the same for all units."""
        value = self.read_value(node.args[0])
        sizes = read_node_shape(node)
        known = [()] * (len(sizes) - len(value.dimensions)) + list(value.dimensions)
        is_mask = node.meta["val"].dtype == torch.bool
        why = None if is_mask else "its units are copies, like the key of a group of queries"
        return LabelledTensor(
            tuple(d or self.labels.dimension(size, why) for d, size in zip(known, sizes, strict=True))
        )

    def on_select(self, node: Node) -> LabelledTensor:
        """Blocks the dimension of which one position is selected."""
        value = self.read_value(node.args[0])
        d = get_argument(node, 1, 0) % len(value.dimensions)
        self.labels.block(value.dimensions[d], "one of its positions is selected")
        return LabelledTensor(drop_dimension(value, d))

    def on_index(self, node: Node) -> LabelledTensor:
        """Blocks the dimensions of which positions are selected."""
        value = self.read_value(node.args[0])
        indices = [self.read_value(argument) for argument in get_argument(node, 1, ())]
        why = "some of its positions are selected"
        for dimension in value.dimensions[: len(indices)]:
            self.labels.block(dimension, why)
        rest = value.dimensions[len(indices) :]
        sizes = read_node_shape(node)[: len(read_node_shape(node)) - len(rest)]
        return LabelledTensor((*(self.labels.dimension(size, why) for size in sizes), *rest))

    def on_slice(self, node: Node) -> LabelledTensor:
        """Divides the dimension if the slice is one of several equal parts; otherwise blocks it."""
        value = self.read_value(node.args[0])
        d = get_argument(node, 1, 0) % len(value.dimensions)
        whole, size = read_node_shape(node.all_input_nodes[0])[d], read_node_shape(node)[d]
        if whole == size:
            return LabelledTensor(value.dimensions)
        start = (get_argument(node, 2, None) or 0) % whole
        aligned = size > 0 and whole % size == 0 and start % size == 0 and get_argument(node, 4, 1) == 1
        return self.replace_dimension(value, d, self.split_part(value.dimensions[d], size) if aligned else None, size)

    def on_parts(self, node: Node) -> list[LabelledTensor]:
        """Divides the dimension if the parts are equal; otherwise blocks it."""
        value = self.read_value(node.args[0])
        d = get_argument(node, 2, 0) % len(value.dimensions)
        sizes = [int(tensor.shape[d]) for tensor in node.meta["val"]]
        inside = self.split_part(value.dimensions[d], sizes[0]) if len(set(sizes)) == 1 else None
        return [self.replace_dimension(value, d, inside, size) for size in sizes]

    def on_unbind(self, node: Node) -> list[LabelledTensor]:
        """Blocks the dimension whose positions become tensors of their own."""
        value = self.read_value(node.args[0])
        d = get_argument(node, 1, 0) % len(value.dimensions)
        self.labels.block(value.dimensions[d], "its parts are used in different ways")
        return [LabelledTensor(drop_dimension(value, d)) for _ in node.meta["val"]]

    def split_part(self, dimension: Dimension, size: int) -> Dimension | None:
        """Splits the dimension into equal parts of `size` and returns the inside of a part; None if not divisible."""
        halves = self.labels.split(dimension, self.labels.size(self.labels.resolve(dimension)) // size)
        if halves is None:
            return None
        self.labels.block(halves[0], "its parts are used in different ways")
        return halves[1]

    def replace_dimension(
        self, value: LabelledTensor, d: int, dimension: Dimension | None, size: int
    ) -> LabelledTensor:
        """Returns the value with dimension `d` replaced; None, for a part that can't be followed, blocks it."""
        if dimension is None:
            why = "only a part of it is used"
            self.labels.block(value.dimensions[d], why)
            dimension = self.labels.dimension(size, why)
        return LabelledTensor((*value.dimensions[:d], dimension, *value.dimensions[d + 1 :]))

    def on_cat(self, node: Node) -> LabelledTensor:
        """Adds an outer label where all parts are the same dimension; otherwise blocks them."""
        values = [self.read_value(argument) for argument in get_argument(node, 0, ())]
        count = len(read_node_shape(node))
        d = get_argument(node, 1, 0) % count
        joined = [value.dimensions[d] for value in values]
        others = [tuple(() if i == d else known for i, known in enumerate(value.dimensions)) for value in values]
        result = list(self.broadcast(others, count))
        if len({self.labels.resolve(dimension) for dimension in joined}) == 1:
            result[d] = (*self.labels.dimension(len(values), "its parts come from different tensors"), *joined[0])
        else:
            for dimension in joined:
                self.labels.block(dimension, "it's concatenated with another dimension")
            result[d] = self.labels.dimension(read_node_shape(node)[d], "it's concatenated from several dimensions")
        return LabelledTensor(tuple(result))


def drop_dimension(value: LabelledTensor, d: int) -> tuple[Dimension, ...]:
    """Returns the value's dimensions except for number `d`."""
    return (*value.dimensions[:d], *value.dimensions[d + 1 :])


def get_argument(node: Node, i: int, default: Any) -> Any:
    """Returns argument number `i`, passed by position or by its name in the operator's schema."""
    if len(node.args) > i:
        return node.args[i]
    named = getattr(node.target, "_schema").arguments  # noqa: B009
    return node.kwargs.get(named[i].name, default) if len(named) > i else default


def read_node_shape(node: Node) -> list[int]:
    """Returns the sizes of a node's result."""
    return [int(size) for size in node.meta["val"].shape]


def name_operator(node: Node) -> str:
    """Returns the short name of a node's operator, such as `linear` for aten.linear.default."""
    name = getattr(node.target, "name", None)
    return name().split("::")[-1].split(".")[0] if callable(name) else str(node.target)


def is_tensors(result: object) -> bool:
    """Returns whether a node's result is one or several tensors, rather than numbers, a check or nothing."""
    if isinstance(result, list | tuple):
        return bool(result) and all(isinstance(value, torch.Tensor) for value in result)
    return isinstance(result, torch.Tensor)
