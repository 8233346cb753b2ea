"""Conversion of labels to axes, by the layers and roles in which each label occurs."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod

from distill.slicing.tracing.axes import Axis, AxisKind, Role, Slot
from distill.slicing.tracing.labels import Dimension, Labels

Roles = Mapping[tuple[str, int], Role]  # (parameter, dimension) -> role
Slots = Mapping[int, list[Slot]]  # label -> all its occurrences
OUTER = "no weight produces it, or none consumes it: it's an input or an output"


class AxisClassifier:
    """Finds the axes among a model's labels.

    Args:
        stack: Name of the module list that holds the layers.
        labels: All labels.
        parameters: Name -> labelled dimensions of each parameter.
        roles: The roles in which operators use the parameters' dimensions.
        embedding: Name of the token embedding's weight.
    """

    def __init__(
        self,
        stack: str,
        labels: Labels,
        parameters: Mapping[str, tuple[Dimension, ...]],
        roles: Roles,
        embedding: str,
    ) -> None:
        self.stack, self.labels, self.parameters, self.roles = stack, labels, parameters, roles
        self.rows, self.columns = (set(labels.resolve(dimension)) for dimension in parameters[embedding])
        projection = parameters.get(f"{embedding.removesuffix('weight')}projection.weight")
        self.columns |= set(labels.resolve(projection[0])) if projection else set()

    def classify(self) -> tuple[list[Axis], list[Axis]]:
        """Returns the prunable axes, and those joined from several feed-forward networks of one layer."""
        slots, repeated = self.list_slots()
        for label in repeated:
            self.labels.block((label,), "it occurs twice in one dimension of a weight")
        self.join_heads(slots)
        self.join_streams(self.list_slots()[0])
        slots, _ = self.list_slots()
        for label, places in slots.items():
            if label not in self.rows and {"in", "out"} - {slot.role for slot in places}:
                self.labels.block((label,), OUTER)
        streams = self.find_stream(slots)
        axes = [self.build_axis("hidden", None, [label], slots) for label in streams]
        local = self.group_local(slots, streams)
        joined = self.join_networks(local, slots)
        for layer, kind in sorted(local, key=lambda key: (key[0], key[1] != "heads")):
            if len(local[layer, kind]) == 1:
                axes.append(self.build_axis(kind, layer, local[layer, kind], slots))
        if len(self.rows) == 1 and all(map(self.is_free, self.rows)):
            axes.append(self.build_axis("vocabulary", None, [*self.rows], slots))
        return axes, joined

    def list_slots(self) -> tuple[dict[int, list[Slot]], set[int]]:
        """Returns label -> its slots in the weights, and the labels that occur twice in one dimension."""
        slots: dict[int, list[Slot]] = defaultdict(list)
        repeated: set[int] = set()
        for (name, d), role in self.roles.items():
            labels = self.labels.resolve(self.parameters[name][d])
            sizes = [self.labels.all[label].size for label in labels]
            repeated |= {label for label, count in Counter(labels).items() if count > 1}
            for i, label in enumerate(labels):
                slots[label].append(Slot(name, d, prod(sizes[:i]), prod(sizes[i + 1 :]), role))
        return slots, repeated

    def list_layers(self, slots: Sequence[Slot]) -> set[int | None]:
        """Returns the layers that the slots are in, with None for those outside the stack."""
        return {find_layer(slot.parameter, self.stack) for slot in slots}

    def is_free(self, label: int) -> bool:
        """Returns whether units of the label can be removed."""
        return self.labels.all[label].blocked is None

    def list_candidates(self, slots: Slots) -> list[int]:
        """Returns free labels that span several layers, or a layer and weights outside the stack, most layers first."""
        spanning = [label for label in slots if self.is_free(label) and label not in self.rows]
        spanning = [label for label in spanning if len(self.list_layers(slots[label])) > 1]
        spanning = [label for label in spanning if not self.labels.all[label].attends]
        return sorted(spanning, key=lambda label: -len(self.list_layers(slots[label])))

    def list_widest(self, slots: Slots) -> list[int]:
        """Returns the candidates that span the most layers."""
        candidates = self.list_candidates(slots)
        counts = [len(self.list_layers(slots[label])) for label in candidates]
        return [label for label, count in zip(candidates, counts, strict=True) if count == counts[0]]

    def join_streams(self, slots: Slots) -> None:
        """Unifies dimensions of one size that run through all layers.

        DeBERTa has hidden states and relative positions, which every layer projects; both have `hidden_size`.
        """
        widest = self.list_widest(slots)
        if len({self.labels.all[label].size for label in widest}) == 1:
            for label in widest[1:]:
                self.labels.unify((widest[0],), (label,), "a second stream is divided differently")

    def find_stream(self, slots: Slots) -> list[int]:
        """Returns the label of the residual stream; none if several labels span the same number of layers."""
        widest = self.list_widest(slots)
        if len(widest) == 1:
            return widest
        for label in widest:
            self.labels.block((label,), "it's one of several dimensions that run through all layers")
        return []

    def join_heads(self, slots: Slots) -> None:
        """Unifies the residual stream with inner widths of output heads that have the same size."""
        streams = self.list_candidates(slots)
        for label in [label for label in slots if self.is_free(label) and label not in self.rows | self.columns]:
            places = slots[label]
            is_inner = self.list_layers(places) == {None} and {"in", "out"} <= {slot.role for slot in places}
            if is_inner and streams and self.labels.all[label].size == self.labels.all[streams[0]].size:
                self.labels.unify((streams[0],), (label,), "a head's width is divided differently")

    def group_local(self, slots: Slots, streams: Sequence[int]) -> dict[tuple[int, AxisKind], list[int]]:
        """Returns (layer, kind) -> labels of units that belong to that layer only; blocks all but single labels."""
        groups: dict[tuple[int, AxisKind], list[int]] = defaultdict(list)
        for label, places in slots.items():
            (layer, *others) = self.list_layers(places)
            if others or layer is None or label in self.rows or label in streams or not self.is_free(label):
                continue
            if self.labels.all[label].normed:
                self.labels.block((label,), "a norm runs over it, so what is removed would change what stays")
                continue
            groups[layer, "heads" if self.labels.all[label].attends else "ffn"].append(label)
        for several in groups.values():
            for label in several if len(several) > 1 else ():
                self.labels.block((label,), "its layer has several of the kind")
        return groups

    def join_networks(self, local: Mapping[tuple[int, AxisKind], list[int]], slots: Slots) -> list[Axis]:
        """Returns an axis for each layer with several feed-forward networks of one width.

        A unit of the axis is one unit of each network.
        """
        axes = []
        for (layer, kind), several in sorted(local.items()):
            # A width within the layer that a scale runs over, such as a bottleneck's, is none of a network.
            inner = [label for label in several if all(slot.role != "scale" for slot in slots[label])]
            sizes = {self.labels.all[label].size for label in inner}
            if kind == "ffn" and len(several) > 1 and len(sizes) == 1:
                axes.append(self.build_axis("ffn", layer, inner, slots))
        return axes

    def build_axis(self, kind: AxisKind, layer: int | None, labels: Sequence[int], slots: Slots) -> Axis:
        """Returns the axis of one label, or of several with the same units."""
        name = kind if layer is None else f"layers.{layer}.{kind}"
        places = tuple(slot for label in labels for slot in slots[label])
        return Axis(name, kind, layer, self.labels.all[labels[0]].size, places)

    def explain_rest(self, axes: Sequence[Axis]) -> dict[str, str]:
        """Returns `parameter[dimension]` -> reason for each dimension that is in none of the axes."""
        places = {(slot.parameter, slot.dim) for axis in axes for slot in axis.slots}
        reasons: dict[str, str] = {}
        for name, dimensions in self.parameters.items():
            for d, dimension in enumerate(dimensions):
                labels = self.labels.labels(dimension)
                if (name, d) not in places and labels:
                    is_used = (name, d) in self.roles
                    other = "it's none of the known kinds" if is_used else "no operator with known inputs uses it"
                    reasons[f"{name}[{d}]"] = next((label.blocked for label in labels if label.blocked), other)
        return reasons


def find_layer(parameter: str, stack: str) -> int | None:
    """Returns the number of the layer that a parameter belongs to; None outside the stack."""
    if not parameter.startswith(f"{stack}."):
        return None
    return int(parameter[len(stack) + 1 :].split(".")[0])
