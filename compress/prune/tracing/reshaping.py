"""The effect of operators that only move or reduce coordinates on labels: views, swaps, splits, joins, reductions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from compress.prune.tracing.labels import Dimension, Labels

VIEWS = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"}
SWAPS = {"transpose", "permute", "t", "numpy_T", "swapaxes", "mT"}
REDUCTIONS = {"mean", "sum", "var", "amax", "amin"}
PARTS = {"split", "split_with_sizes", "chunk"}


@dataclass(frozen=True)
class Value:
    """The labelled dimensions of a tensor.

    Args:
        dimensions: The labels of each dimension.
        weight: For a parameter, its name and the parameter's dimension index of each dimension; None for other tensors.
    """

    dimensions: tuple[Dimension, ...]
    weight: tuple[str, tuple[int, ...]] | None = None


class UnsupportedArgumentsError(Exception):
    """The arguments of an operator aren't covered by any rule."""


class Reshaping:
    """Rules for operators that move, join or reduce coordinates; each takes a node and returns its labelled result."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.values: dict[Node, Any] = {}

    def rule(self, name: str) -> Callable[[Node], Any] | None:
        groups = ((VIEWS, self.view), (SWAPS, self.swap), (PARTS, self.parts), (REDUCTIONS, self.reduction))
        return next((rule for names, rule in groups if name in names), getattr(self, f"on_{name}", None))

    def value(self, argument: Any) -> Value:
        """Returns the labels of an argument that must be a tensor."""
        found = self.values.get(argument) if isinstance(argument, Node) else None
        if not isinstance(found, Value):
            raise UnsupportedArgumentsError
        return found

    def optional(self, node: Node, i: int) -> Value | None:
        """Returns the labels of an argument that may be None or missing."""
        argument = get_argument(node, i, None)
        return None if argument is None else self.value(argument)

    def broadcast(self, inputs: Sequence[tuple[Dimension, ...]], count: int) -> tuple[Dimension, ...]:
        """Unifies the dimensions of broadcast tensors, aligned at the last; size 1 adopts the labels of the other."""
        result: list[Dimension] = [()] * count
        for dimensions in inputs:
            for back in range(1, len(dimensions) + 1):
                if dimensions[-back] and result[-back]:
                    self.labels.unify(result[-back], dimensions[-back], "it meets a dimension cut up differently")
                result[-back] = result[-back] or dimensions[-back]
        return tuple(result)

    def view(self, node: Node) -> Value:
        dimensions = self.value(node.args[0]).dimensions
        return Value(tuple(self.labels.reshape(dimensions, shape(node), "a view cuts across its units")))

    def swap(self, node: Node) -> Value:
        value = self.value(node.args[0])
        count = len(value.dimensions)
        order = list(range(count))
        if operator(node) == "permute":
            order = [d % count for d in get_argument(node, 1, ())]
        elif count > 1:
            a, b = get_argument(node, 1, -2), get_argument(node, 2, -1)
            order[a], order[b] = order[b], order[a]
        weight = (value.weight[0], tuple(value.weight[1][d] for d in order)) if value.weight else None
        return Value(tuple(value.dimensions[d] for d in order), weight)

    def reduction(self, node: Node) -> Value:
        value = self.value(node.args[0])
        count = len(value.dimensions)
        named = get_argument(node, 1, None)
        gone = {d % count for d in ([named] if isinstance(named, int) else named or range(count))}
        for d in gone:
            self.norm(value.dimensions[d])
        if len(shape(node)) == count:
            return Value(tuple(() if d in gone else known for d, known in enumerate(value.dimensions)))
        return Value(tuple(known for d, known in enumerate(value.dimensions) if d not in gone))

    def norm(self, dimension: Dimension) -> None:
        for label in self.labels.labels(dimension):
            label.normed = True

    def on_expand(self, node: Node) -> Value:
        value = self.value(node.args[0])
        sizes = shape(node)
        known = [()] * (len(sizes) - len(value.dimensions)) + list(value.dimensions)
        why = "it repeats one thing, as the key of a group of queries"
        return Value(tuple(d or self.labels.dimension(size, why) for d, size in zip(known, sizes, strict=True)))

    def on_select(self, node: Node) -> Value:
        value = self.value(node.args[0])
        d = get_argument(node, 1, 0) % len(value.dimensions)
        self.labels.block(value.dimensions[d], "one of its positions is picked")
        return Value(without(value, d))

    def on_index(self, node: Node) -> Value:
        value = self.value(node.args[0])
        places = [self.value(place) for place in get_argument(node, 1, ())]
        why = "some of its positions are picked"
        for dimension in value.dimensions[: len(places)]:
            self.labels.block(dimension, why)
        rest = value.dimensions[len(places) :]
        picked = shape(node)[: len(shape(node)) - len(rest)]
        return Value((*(self.labels.dimension(size, why) for size in picked), *rest))

    def on_slice(self, node: Node) -> Value:
        value = self.value(node.args[0])
        d = get_argument(node, 1, 0) % len(value.dimensions)
        whole, made = shape(node.all_input_nodes[0])[d], shape(node)[d]
        if whole == made:
            return Value(value.dimensions)
        start = (get_argument(node, 2, None) or 0) % whole
        aligned = made > 0 and whole % made == 0 and start % made == 0 and get_argument(node, 4, 1) == 1
        return self.replaced(value, d, self.part(value.dimensions[d], made) if aligned else None, made)

    def parts(self, node: Node) -> list[Value]:
        value = self.value(node.args[0])
        d = get_argument(node, 2, 0) % len(value.dimensions)
        sizes = [int(tensor.shape[d]) for tensor in node.meta["val"]]
        inside = self.part(value.dimensions[d], sizes[0]) if len(set(sizes)) == 1 else None
        return [self.replaced(value, d, inside, size) for size in sizes]

    def on_unbind(self, node: Node) -> list[Value]:
        value = self.value(node.args[0])
        d = get_argument(node, 1, 0) % len(value.dimensions)
        self.labels.block(value.dimensions[d], "each of its parts is used in its own way")
        return [Value(without(value, d)) for _ in node.meta["val"]]

    def part(self, dimension: Dimension, size: int) -> Dimension | None:
        """Splits the dimension into equal parts of `size` and returns the inside of a part; None if not divisible."""
        halves = self.labels.split(dimension, self.labels.size(self.labels.resolve(dimension)) // size)
        if halves is None:
            return None
        self.labels.block(halves[0], "each of its parts is used in its own way")
        return halves[1]

    def replaced(self, value: Value, d: int, dimension: Dimension | None, size: int) -> Value:
        """Returns the value with dimension `d` replaced; None, for a part that can't be followed, blocks it."""
        if dimension is None:
            why = "only a part of it is used"
            self.labels.block(value.dimensions[d], why)
            dimension = self.labels.dimension(size, why)
        return Value((*value.dimensions[:d], dimension, *value.dimensions[d + 1 :]))

    def on_cat(self, node: Node) -> Value:
        values = [self.value(argument) for argument in get_argument(node, 0, ())]
        count = len(shape(node))
        d = get_argument(node, 1, 0) % count
        joined = [value.dimensions[d] for value in values]
        others = [tuple(() if i == d else known for i, known in enumerate(value.dimensions)) for value in values]
        result = list(self.broadcast(others, count))
        if len({self.labels.resolve(dimension) for dimension in joined}) == 1:
            result[d] = (*self.labels.dimension(len(values), "each of its parts comes from elsewhere"), *joined[0])
        else:
            for dimension in joined:
                self.labels.block(dimension, "it's joined to something else")
            result[d] = self.labels.dimension(shape(node)[d], "it's joined from several")
        return Value(tuple(result))


def without(value: Value, d: int) -> tuple[Dimension, ...]:
    return (*value.dimensions[:d], *value.dimensions[d + 1 :])


def get_argument(node: Node, i: int, default: Any) -> Any:
    """Returns argument number `i`, passed by position or by its name in the operator's schema."""
    if len(node.args) > i:
        return node.args[i]
    named = getattr(node.target, "_schema").arguments  # noqa: B009
    return node.kwargs.get(named[i].name, default) if len(named) > i else default


def shape(node: Node) -> list[int]:
    return [int(size) for size in node.meta["val"].shape]


def operator(node: Node) -> str:
    """Returns the short name of a node's operator, such as `linear` for aten.linear.default."""
    name = getattr(node.target, "name", None)
    return name().split("::")[-1].split(".")[0] if callable(name) else str(node.target)


def tensors(made: Any) -> bool:
    """Returns whether a node's result is one or several tensors, rather than numbers, a check or nothing."""
    if isinstance(made, list | tuple):
        return bool(made) and all(isinstance(value, torch.Tensor) for value in made)
    return isinstance(made, torch.Tensor)
