"""Detection of a model's prunable axes by following dimensions through its graph, independent of weight names."""

import logging
from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CompressError
from compress.prune.tracing.axes import Axis, Kind, Role, Slot
from compress.prune.tracing.labels import Dimension, Labels
from compress.prune.tracing.operators import Follower, Use
from compress.prune.tracing.reshaping import Value


@dataclass(frozen=True)
class Traced:
    """The result of tracing a model.

    Args:
        axes: The prunable axes: hidden, then each layer's heads and ffn, then vocabulary.
        left_out: `parameter[dimension]` -> reason why no unit of it can be removed.
    """

    axes: tuple[Axis, ...]
    left_out: Mapping[str, str]


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
        CompressError: The model can't be traced, its layers aren't in one list, or nothing but the vocabulary can be
            pruned.

    Source: coupled parameters by their dependency graph follow Fang et al. (2023), DepGraph, arXiv 2301.12900; here the
        graph is of dimensions and not of layers.
    """
    return list(trace(model, example).axes)


def layer_stack(model: PreTrainedModel) -> str:
    """Returns the name of the ModuleList that holds the model's layers, such as `bert.encoder.layer`.

    Raises:
        CompressError: There is no such list, as in a model whose layers share weights, or more than one.
    """
    count = getattr(model.config, "num_hidden_layers", None)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found = [name for name, module in lists.items() if len(module) == count]
    found = [name for name in found if not any(name.startswith(f"{outer}.") for outer in lists)]
    if len(found) != 1:
        raise CompressError(
            f"{model.config.model_type}: expected one list of {count} layers, found {found or sorted(lists) or 'none'} "
            "(no layer could be told from another, so this family can't be pruned)"
        )
    return found[0]


def trace(model: PreTrainedModel, example: Mapping[str, Tensor] | None = None) -> Traced:
    """Returns the axes as `find_axes` does, with the reasons for the dimensions left out."""
    stack = layer_stack(model)
    labels = Labels()
    names = names_of_tensors(model)
    dimensions = {first: tuple(labels.dimension(size) for size in tensor.shape) for first, tensor in names.items()}
    aliases = {name: first for first, group in aliases_of(model).items() for name in group}
    embedding, head = vocabulary_weights(model)
    follower = Follower(labels, aliases[embedding])
    program = exported(model, example)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            follower.values[node] = placeholder(node, program, labels, dimensions, aliases)
        elif node.op == "call_function":
            follower.follow(node)
    if head is not None and names[aliases[head]].shape[0] == names[aliases[embedding]].shape[0]:
        labels.unify(dimensions[aliases[embedding]][0], dimensions[aliases[head]][0], "the LM head's rows differ")
    found = Axes(model, stack, labels, {name: dimensions[first] for name, first in aliases.items()})
    traced = found.classify(roles(model, aliases, follower.uses), embedding)
    if all(axis.kind == "vocabulary" for axis in traced.axes):
        raise CompressError(
            f"{model.config.model_type}: expected heads, feed-forward units or hidden coordinates to remove, found "
            f"none in {type(model).__name__}; reasons: {sorted(set(traced.left_out.values()))[:5]}"
        )
    return traced


def names_of_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns first name -> parameter, each parameter once."""
    return dict(model.named_parameters())


def aliases_of(model: nn.Module) -> dict[str, list[str]]:
    """Returns first name -> all names of a parameter; tied weights have more than one."""
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        groups[first[id(tensor)]].append(name)
    return groups


def vocabulary_weights(model: PreTrainedModel) -> tuple[str, str | None]:
    """Returns the names of the token embedding and of the LM head's weight, None for a model without an LM head."""
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return first[id(model.get_input_embeddings().weight)], None if weight is None else first[id(weight)]


class Outputs(nn.Module):
    """A wrapper that returns all tensor outputs of a model as a list, which torch.export supports."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        cache = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        outputs = self.model(**inputs, return_dict=True, **cache)
        return [value for value in outputs.values() if isinstance(value, Tensor)]


def exported(model: PreTrainedModel, example: Mapping[str, Tensor] | None) -> torch.export.ExportedProgram:
    """Exports the model's graph without computing any values; the model is left unchanged."""
    given = dict(example or {"input_ids": torch.ones(2, 7, dtype=torch.int64)})
    given = {name: tensor.to(model.device) for name, tensor in given.items()}
    asked = model.config._attn_implementation
    logger = logging.getLogger("torch.export")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        if asked not in ("eager", "sdpa"):
            model.config._attn_implementation = "sdpa"  # flash kernels can't be exported; the weights are the same
        with torch.no_grad():
            return torch.export.export(Outputs(model), (given,), strict=False)
    except Exception as error:
        raise CompressError(
            f"{model.config.model_type}: {type(model).__name__} could not be traced with {sorted(given)}, so it isn't "
            f"known what goes together: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    finally:
        logger.setLevel(level)
        model.config._attn_implementation = asked


def placeholder(
    node: torch.fx.Node,
    program: torch.export.ExportedProgram,
    labels: Labels,
    dimensions: Mapping[str, tuple[Dimension, ...]],
    aliases: Mapping[str, str],
) -> Value | None:
    """Returns the labels of a parameter, or blocked labels for any other tensor input of the graph."""
    name = program.graph_signature.inputs_to_parameters.get(node.name)
    if name is not None:
        first = aliases[name.removeprefix("model.")]
        return Value(dimensions[first], (first, tuple(range(len(dimensions[first])))))
    made = node.meta.get("val")
    if not isinstance(made, Tensor):
        return None
    why = "it's bound to an input or to a constant, as the angles of rotary positions"
    return Value(tuple(labels.dimension(int(size), why) for size in made.shape))


def roles(model: nn.Module, aliases: Mapping[str, str], uses: list[Use]) -> dict[tuple[str, int], Role]:
    """Returns (name, dimension) -> role; of tied weights, the name in an nn.Embedding gets the embedding's role."""
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    found: dict[tuple[str, int], Role] = {}
    for name, first in aliases.items():
        table = name.rpartition(".")[0] in tables
        for use in (use for use in uses if use.parameter == first):
            key = (name, use.dimension)
            if key not in found or table == (use.operator == "embedding"):
                found[key] = use.role
    return found


class Axes:
    """Conversion of labels to axes, by the layers and roles in which each label appears."""

    def __init__(
        self, model: PreTrainedModel, stack: str, labels: Labels, parameters: Mapping[str, tuple[Dimension, ...]]
    ) -> None:
        self.model, self.stack, self.labels, self.parameters = model, stack, labels, parameters

    def classify(self, roles: Mapping[tuple[str, int], Role], embedding: str) -> Traced:
        rows, columns = (set(self.labels.resolve(dimension)) for dimension in self.parameters[embedding])
        projection = self.parameters.get(f"{embedding.removesuffix('weight')}projection.weight")
        columns |= set(self.labels.resolve(projection[0])) if projection else set()
        slots, twice = self.slots(roles)
        for label in twice:
            self.labels.block((label,), "it runs twice through one dimension of a weight")
        self.join_heads(slots, rows, columns)
        slots, _ = self.slots(roles)
        for label, where in slots.items():
            if label not in rows and {"in", "out"} - {slot.role for slot in where}:
                self.labels.block((label,), "nothing takes it up, or nothing makes it: it's an output or an input")
        streams = self.stream(slots, rows)
        axes = [self.axis("hidden", None, label, slots) for label in streams]
        local = self.local(slots, rows, streams)
        for layer, kind in sorted(local, key=lambda place: (place[0], place[1] != "heads")):
            axes.append(self.axis(kind, layer, local[layer, kind], slots))
        axes += [self.axis("vocabulary", None, label, slots) for label in rows if self.free(label) and len(rows) == 1]
        taken = {(slot.parameter, slot.dim) for axis in axes for slot in axis.slots}
        return Traced(tuple(axes), self.reasons(taken, roles))

    def slots(self, roles: Mapping[tuple[str, int], Role]) -> tuple[dict[int, list[Slot]], set[int]]:
        """Returns label -> its slots in the weights, and the labels that occur twice in one dimension."""
        found: dict[int, list[Slot]] = defaultdict(list)
        twice: set[int] = set()
        for (name, d), role in roles.items():
            known = self.labels.resolve(self.parameters[name][d])
            sizes = [self.labels.all[label].size for label in known]
            twice |= {label for label, count in Counter(known).items() if count > 1}
            for i, label in enumerate(known):
                found[label].append(Slot(name, d, prod(sizes[:i]), prod(sizes[i + 1 :]), role))
        return found, twice

    def layer(self, slot: Slot) -> int | None:
        if not slot.parameter.startswith(f"{self.stack}."):
            return None
        return int(slot.parameter[len(self.stack) + 1 :].split(".")[0])

    def layers(self, slots: list[Slot]) -> set[int | None]:
        return {self.layer(slot) for slot in slots}

    def free(self, label: int) -> bool:
        return self.labels.all[label].blocked is None

    def candidates(self, slots: Mapping[int, list[Slot]], rows: set[int]) -> list[int]:
        """Returns free labels that span several layers, or a layer and weights outside the stack, most layers first."""
        through = [label for label in slots if self.free(label) and label not in rows]
        through = [label for label in through if len(self.layers(slots[label])) > 1]
        through = [label for label in through if not self.labels.all[label].attends]
        return sorted(through, key=lambda label: -len(self.layers(slots[label])))

    def stream(self, slots: Mapping[int, list[Slot]], rows: set[int]) -> list[int]:
        """Returns the label of the residual stream, none if several labels span the same number of layers."""
        found = self.candidates(slots, rows)
        widest = [label for label in found if len(self.layers(slots[label])) == len(self.layers(slots[found[0]]))]
        if len(widest) == 1:
            return widest
        for label in widest:
            self.labels.block((label,), "it's one of several dimensions that run through all layers")
        return []

    def join_heads(self, slots: Mapping[int, list[Slot]], rows: set[int], columns: set[int]) -> None:
        """Unifies the residual stream with inner widths of output heads that have the same size."""
        streams = self.candidates(slots, rows)
        for label in [label for label in slots if self.free(label) and label not in rows | columns]:
            where = slots[label]
            inner = self.layers(where) == {None} and {"in", "out"} <= {slot.role for slot in where}
            if inner and streams and self.labels.all[label].size == self.labels.all[streams[0]].size:
                self.labels.unify((streams[0],), (label,), "a head's width is cut up differently")

    def local(self, slots: Mapping[int, list[Slot]], rows: set[int], streams: list[int]) -> dict[tuple[int, Kind], int]:
        """Returns (layer, kind) -> label of the units that belong to that layer only."""
        found: dict[tuple[int, Kind], list[int]] = defaultdict(list)
        for label, where in slots.items():
            (layer, *more) = self.layers(where)
            if more or layer is None or label in rows or label in streams or not self.free(label):
                continue
            if self.labels.all[label].normed:
                self.labels.block((label,), "a norm runs over it, so what is removed would change what stays")
                continue
            found[layer, "heads" if self.labels.all[label].attends else "ffn"].append(label)
        for several in (several for several in found.values() if len(several) > 1):
            for label in several:
                self.labels.block((label,), "its layer has several of the kind")
        return {place: several[0] for place, several in found.items() if len(several) == 1}

    def axis(self, kind: Kind, layer: int | None, label: int, slots: Mapping[int, list[Slot]]) -> Axis:
        name = kind if layer is None else f"layers.{layer}.{kind}"
        return Axis(name, kind, layer, self.labels.all[label].size, tuple(slots[label]))

    def reasons(self, taken: set[tuple[str, int]], roles: Container[tuple[str, int]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, dimensions in self.parameters.items():
            for d, dimension in enumerate(dimensions):
                known = self.labels.labels(dimension)
                if (name, d) not in taken and known:
                    other = "it's none of the known kinds" if (name, d) in roles else "the trace doesn't reach it"
                    why = next((label.blocked for label in known if label.blocked), other)
                    found[f"{name}[{d}]"] = why
        return found
