"""Gates: multipliers on the units of coupled dimensions and on whole layers, applied without modifying weights.

A gate of 1 leaves a unit unchanged, a gate of 0 removes it, and in between the model changes smoothly, so that
importance can be measured and masks can be trained on gates. A unit is gated where it is consumed, once on every path:

- heads, feed-forward neurons and hidden coordinates: the input of each linear layer that consumes them;
- hidden coordinates in a norm: mean and variance are weighted by the gates, so closed coordinates don't count;
- a layer: its output becomes input + gate * (output - input).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from compress.errors import CompressError
from distill.checkpoint.layers import find_layer_stack
from distill.slicing import Axis, Kept, Role, Slot

LAYERS = "layers"  # key of the gates of whole layers, beside the axes' names
LayerOutput = Tensor | tuple[Tensor, ...]


class Gates:
    """Gates on a model's axes; the hooks are active between `attach` and `remove`, or inside a `with` block.

    A closed hidden coordinate is also zeroed where it is produced, so that returned hidden states don't contain it. A
    gate between 0 and 1 isn't applied there: code that uses returned hidden states must multiply them by
    `values["hidden"]`.

    Args:
        model: A model whose linear layers, embeddings and norms are in the axes' slots; no weight is modified.
        axes: Axes of kind heads, ffn and hidden can be gated; a vocabulary can't and is ignored.
        values: See `set`.

    Raises:
        CompressError: A slot isn't in the model, has another size, or belongs to a module that can't be gated; the
            layers aren't in one list.
    """

    def __init__(self, model: PreTrainedModel, axes: Sequence[Axis], values: Mapping[str, Tensor] | None = None):
        self.axes = {axis.name: axis for axis in axes if axis.kind != "vocabulary"}
        self.modules = {axis.name: _find_gated_modules(model, axis) for axis in self.axes.values()}
        self.layers = list(model.get_submodule(find_layer_stack(model)).children())
        self.sizes = {name: axis.units for name, axis in self.axes.items()}
        self.sizes[LAYERS] = len(self.layers)
        self.values: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []
        self.set(values or {})

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Sets the gates to apply from now on; axes without gates are left unchanged.

        Args:
            values: Name of an axis -> gates [units], or [batch, units] for gates per sample (inputs must then have the
                samples first); `layers` -> [layers] or [batch, layers]. Gates may require gradients.

        Raises:
            CompressError: The name is unknown or the number of units differs.
        """
        for name, gate in values.items():
            units = self.get_size(name)
            if gate.dim() not in (1, 2) or gate.shape[-1] != units:
                raise CompressError(
                    f"gates for {name!r}: expected shape [{units}] or [batch, {units}], found {list(gate.shape)}: "
                    "gates would multiply other units"
                )
        self.values = dict(values)

    def make_open(self, samples: int | None = None) -> dict[str, Tensor]:
        """Returns open gates [units], or [samples, units], for all axes and for the layers."""
        batch = () if samples is None else (samples,)
        return {name: torch.ones(*batch, size) for name, size in self.sizes.items()}

    def make_mask(self, kept_units: Kept) -> dict[str, Tensor]:
        """Returns gates [units], 1 for kept units and 0 for others, for names in `kept_units` (axes, or `layers`)."""
        return {
            name: torch.zeros(self.get_size(name), device=units.device).index_fill(0, units, 1.0)
            for name, units in kept_units.items()
        }

    def get_size(self, name: str) -> int:
        """Returns the number of units of an axis, or of layers.

        Raises:
            CompressError: The name is unknown.
        """
        if name not in self.sizes:
            raise CompressError(
                f"gates: expected one of {', '.join(self.sizes)}, found {name!r}: no such axis can be gated"
            )
        return self.sizes[name]

    def attach(self) -> "Gates":
        """Registers the hooks unless they are registered already."""
        if self.handles:
            return self
        for name, modules in self.modules.items():
            for module, slot in modules["in"].items():
                self.handles.append(module.register_forward_pre_hook(partial(self._gate_input, name, slot)))
            for module, slot in modules["scale"].items():
                self.handles.append(module.register_forward_hook(partial(self._gate_norm, name, slot)))
            if self.axes[name].kind == "hidden":
                for module, slot in modules["out"].items():
                    self.handles.append(module.register_forward_hook(partial(self._gate_output, name, slot)))
        for number, layer in enumerate(self.layers):
            self.handles.append(layer.register_forward_hook(partial(self._gate_layer, number), with_kwargs=True))
        return self

    def remove(self) -> None:
        """Removes the hooks, which restores the model."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def __enter__(self) -> "Gates":
        return self.attach()

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _gate_input(
        self, name: str, slot: Slot, module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if name not in self.values:
            return None
        return (inputs[0] * self._expand(name, slot, inputs[0]), *inputs[1:])

    def _gate_output(
        self, name: str, slot: Slot, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        if name not in self.values:
            return output
        gate = self.values[name]
        is_open = gate.reshape(-1, gate.shape[-1]).ne(0).any(dim=0)  # position embeddings have no batch dimension
        return output * _expand_to_coordinates(is_open, slot).to(output)

    def _gate_norm(
        self, name: str, slot: Slot, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        if name not in self.values:
            return output
        gate = self._expand(name, slot, inputs[0])
        return _apply_weighted_norm(module, inputs[0], output, gate) * (gate != 0)

    def _gate_layer(
        self,
        number: int,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        output: LayerOutput,
    ) -> LayerOutput:
        if LAYERS not in self.values:
            return output
        before = inputs[0] if inputs else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        gate = self.values[LAYERS][..., number]
        # lerp is exact at both ends: an open layer's output is bit-identical
        after = torch.lerp(before.to(after), after, gate.to(after).reshape(-1, *[1] * (after.dim() - 1)))
        return (after, *output[1:]) if isinstance(output, tuple) else after

    def _expand(self, name: str, slot: Slot, x: Tensor) -> Tensor:
        """Returns the axis's gates for every coordinate of `x` [batch, ..., outer * units * inner]."""
        gate = _expand_to_coordinates(self.values[name], slot).to(x)
        if gate.shape[-1] != x.shape[-1]:
            raise CompressError(
                f"axis {name!r}: expected inputs of {slot.parameter} of width {gate.shape[-1]}, found {x.shape[-1]}: "
                "gates would multiply other units"
            )
        if gate.dim() == 1:
            return gate
        if gate.shape[0] != x.shape[0]:
            raise CompressError(
                f"axis {name!r}: expected an input of {slot.parameter} with {gate.shape[0]} samples, as many as gates, "
                f"found shape {list(x.shape)}: samples would get the gates of others"
            )
        return gate.reshape(gate.shape[0], *[1] * (x.dim() - 2), gate.shape[-1])


def _expand_to_coordinates(gate: Tensor, slot: Slot) -> Tensor:
    """Expands gates [..., units] to every coordinate of the slot's dimension: [..., outer * units * inner]."""
    return gate.repeat_interleave(slot.inner, dim=-1).repeat(*[1] * (gate.dim() - 1), slot.outer)


def _apply_weighted_norm(module: nn.Module, x: Tensor, output: Tensor, weight: Tensor) -> Tensor:
    """Returns the output of the norm `module` for `x` [..., width] with coordinates weighted by `weight`.

    Any norm that divides by a root mean square is supported: its unweighted `output` is scaled by the ratio of the two
    roots.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, share = x.to(dtype), weight.to(dtype)
    share = share / share.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    if isinstance(module, nn.LayerNorm):
        centered = x - (share * x).sum(-1, keepdim=True)
        scaled = centered * torch.rsqrt((share * centered.square()).sum(-1, keepdim=True) + module.eps)
        scaled = scaled if module.weight is None else scaled * module.weight
        return (scaled if module.bias is None else scaled + module.bias).to(output.dtype)
    eps = _get_norm_epsilon(module, x)
    mean_square, weighted = x.square().mean(-1, keepdim=True), (share * x.square()).sum(-1, keepdim=True)
    return (output * torch.sqrt((mean_square + eps) / (weighted + eps))).to(output.dtype)


def _get_norm_epsilon(module: nn.Module, x: Tensor) -> float:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return torch.finfo(x.dtype).eps if eps is None else eps  # nn.RMSNorm's default is None, the dtype's eps


def _find_gated_modules(model: nn.Module, axis: Axis) -> dict[Role, dict[nn.Module, Slot]]:
    """Returns the modules that consume (in), norm (scale) and produce (out) an axis, each with one of its slots.

    A tied weight counts for every module that holds it: an embedding produces the axis, the output layer consumes it.
    """
    modules: dict[Role, dict[nn.Module, Slot]] = {"in": {}, "scale": {}, "out": {}}
    weights = dict(model.named_parameters(remove_duplicate=False))
    for slot in axis.slots:
        weight = weights.get(slot.parameter)
        if weight is None:
            raise CompressError(
                f"axis {axis.name!r}: expected a weight {slot.parameter!r}, found none: the axis is of another model"
            )
        width = slot.outer * axis.units * slot.inner
        if weight.shape[slot.dim] != width:
            raise CompressError(
                f"axis {axis.name!r}: expected {slot.outer} x {axis.units} x {slot.inner} coordinates in dimension "
                f"{slot.dim} of {slot.parameter}, found {weight.shape[slot.dim]}: other units would be gated"
            )
        for name in (name for name, other in weights.items() if other is weight):
            module = model.get_submodule(name.rpartition(".")[0])
            role = _find_role(module, slot)
            _check_can_be_gated(module, name, role, axis.name)
            modules[role].setdefault(module, slot)
    return modules


def _find_role(module: nn.Module, slot: Slot) -> Role:
    if isinstance(module, nn.Embedding):
        return "out"
    if isinstance(module, nn.Linear):
        return "in" if slot.dim == 1 else "out"
    return slot.role


def _check_can_be_gated(module: nn.Module, parameter: str, role: Role, axis: str) -> None:
    is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's linear layer
    if role == "in" and not is_linear:
        raise CompressError(
            f"axis {axis!r}: expected a linear layer that consumes it, found {parameter} of a {type(module).__name__}: "
            "its input can't be multiplied by gates"
        )
    is_norm = isinstance(module, nn.LayerNorm) or "RMSNorm" in type(module).__name__
    if role == "scale" and not is_norm:
        raise CompressError(
            f"axis {axis!r}: expected a LayerNorm or an RMSNorm, found {parameter} of a {type(module).__name__}: "
            "its output without the closed units isn't known"
        )
