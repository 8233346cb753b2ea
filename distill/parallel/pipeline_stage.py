"""Construction of one pipeline stage of a model: choice of its layers, and loading of only its weights."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.layers import find_layer_lists
from distill.errors import InputError

_NANOSECONDS = 10**9
_BEFORE, _INSIDE, _AFTER = "before its layers", "in its layers", "after its layers"


@dataclass(frozen=True)
class ModelParts:
    """Names of a model's list of layers and of the modules with weights that run before and after the layers."""

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]


_LayerOutput = Tensor | tuple[Tensor, ...]  # hidden state [rows, length, width], possibly followed by other outputs


class StageBoundary:
    """Passes the hidden state through a stage: every module that was removed from the stage returns it.

    Args:
        index: Index of the stage.
        stages: Layers of all stages.
        tied: Names of the weights that the first and the last stage both have.
        embeddings: Name of the token embeddings' weight, whichever stage has it.
    """

    def __init__(self, index: int, stages: list[range], tied: tuple[str, ...], embeddings: str):
        self.index, self.stages, self.tied, self.count = index, stages, tied, len(stages)
        self.embeddings = embeddings
        self.layers, self.is_first, self.is_last = stages[index], index == 0, index == len(stages) - 1
        self.collected: dict[int, list[Tensor]] = {}
        self.phase, self.hidden = _BEFORE, torch.empty(0)

    def attach(self, body: nn.Module, layers: nn.ModuleList) -> None:
        """Registers hooks on the stage's layers, in a model whose other layers were replaced by placeholders."""
        layers[self.layers[0]].register_forward_pre_hook(self._enter_layers, with_kwargs=True)
        for number in self.layers[:-1]:
            layers[number].register_forward_hook(partial(self._collect, number + 1))
        layers[self.layers[-1]].register_forward_hook(self._leave_layers)
        if self.is_last:
            body.register_forward_hook(partial(self._collect, len(layers)))

    def start(self, received: Tensor, collected: dict[int, list[Tensor]]) -> None:
        """Prepares a forward pass.

        Args:
            received: The previous stage's hidden state, or token ids in the first stage.
            collected: Gets each micro-batch's hidden states of the indices in it.
        """
        self.phase, self.hidden, self.collected = _BEFORE, received, collected

    def finish(self) -> Tensor:
        """Returns the hidden state after the stage's last layer.

        The reference to it is dropped, which would keep its autograd graph alive.
        """
        hidden, self.hidden, self.collected = self.hidden, torch.empty(0), {}
        return hidden

    def _enter_layers(
        self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]] | None:
        """Replaces the input of the stage's first layer by the received hidden state, except in the first stage."""
        self.phase = _INSIDE
        if self.is_first:
            self._collect(0, layer, args, args or (kwargs["hidden_states"],))
            return None
        return ((self.hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": self.hidden})

    def _leave_layers(self, layer: nn.Module, args: tuple[Tensor, ...], output: _LayerOutput) -> None:
        """Stores the output of the stage's last layer."""
        self.phase, self.hidden = _AFTER, output if isinstance(output, Tensor) else output[0]
        if not self.is_last:  # the model's last hidden state is the one after its last norm
            self._collect(self.layers.stop, layer, args, output)

    def _collect(self, number: int, module: nn.Module, args: tuple[Tensor, ...], output: _LayerOutput) -> None:
        if number in self.collected:
            self.collected[number].append(output if isinstance(output, Tensor) else output[0])


class _AbsentModule(nn.Module):
    """Placeholder for another stage's module.

    It has the module's attributes, such as a layer's kind of attention, but no weights.
    """

    def __init__(self, boundary: StageBoundary, phase: str, module: nn.Module):
        super().__init__()
        vars(self).update({name: value for name, value in vars(module).items() if name not in vars(self)})
        self.boundary, self.phase = boundary, phase

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Returns the hidden state that is passed through the stage.

        Raises:
            InputError: The module is called at another point of the forward pass than it was removed from.
        """
        # Otherwise a module that is defined before the layers but runs after them would be skipped silently.
        if self.boundary.phase != self.phase:
            raise InputError(
                f"pipeline stage {self.boundary.index}: expected a removed module to run {self.phase}, found a call "
                f"{self.boundary.phase}: this family runs its modules in another order than it defines them, and can't "
                "be split into pipeline stages"
            )
        return self.boundary.hidden


def find_parts(model: PreTrainedModel) -> ModelParts:
    """Returns the names of a model's parts.

    Raises:
        InputError: The family has no single list of layers, or has weights that belong neither to the layers nor
            clearly before or after them (relative positions shared by all layers, for example).
    """
    body = model.base_model
    prefix = "" if body is model else f"{model.base_model_prefix}."
    count, layer_lists = getattr(model.config, "num_hidden_layers", None), find_layer_lists(cast(PreTrainedModel, body))
    if len(layer_lists) != 1:
        raise InputError(
            f"{type(model).__name__}: expected one list of {count} layers, found {len(layer_lists)}: "
            "this family can't be split into pipeline stages"
        )
    children = [f"{prefix}{name}" for name, _ in body.named_children()]
    at = children.index(f"{prefix}{layer_lists[0].split('.')[0]}")
    heads = [] if body is model else [name for name, each in model.named_children() if each is not body]
    before, after = children[:at], children[at + 1 :] + heads
    parts = ModelParts(prefix + layer_lists[0], _select_weighted(model, before), _select_weighted(model, after))
    known = (parts.layers, *parts.before, *parts.after)
    others = [name for name, _ in model.named_parameters() if not any(_is_inside(name, part) for part in known)]
    if others:
        raise InputError(
            f"{type(model).__name__}: expected all weights in the layers, before or after them, found {others[0]}, "
            "which any layer may use: this family can't be split into pipeline stages"
        )
    return parts


def _select_weighted(model: nn.Module, names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if any(True for _ in model.get_submodule(name).parameters()))


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _count_parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def freeze_embeddings(model: PreTrainedModel) -> None:
    """Freezes the token embeddings of a model, or of a pipeline stage that has them.

    If the head is tied to the embeddings, the last stage has them too, and they are frozen on both.
    """
    boundary = get_boundary(model)
    if boundary is None:
        model.get_input_embeddings().weight.requires_grad_(False)
        return
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name == boundary.embeddings:
            weight.requires_grad_(False)


class PartTimes(NamedTuple):
    """Seconds of a forward and backward pass, by which stages are balanced."""

    before: float  # what runs before the layers, such as embeddings
    layer: float  # one layer
    after: float  # what runs after them, such as an output head


def split_layers(model: PreTrainedModel, count: int, times: PartTimes | None = None) -> list[range]:
    """Returns the layers of each of `count` stages.

    They are chosen to minimize the time of the slowest stage, or without `times` the parameters of the largest one,
    including embeddings and head. The model may be on the meta device.

    Raises:
        InputError: There are more stages than layers, or the family can't be split into stages.
    """
    parts = find_parts(model)
    layers = list(model.get_submodule(parts.layers).children())
    if times is None:
        sizes = [_count_parameters(layer) for layer in layers]
        ends = [
            sum(_count_parameters(model.get_submodule(name)) for name in part) for part in (parts.before, parts.after)
        ]
    else:
        sizes = [round(_NANOSECONDS * times.layer)] * len(layers)
        ends = [round(_NANOSECONDS * each) for each in (times.before, times.after)]
    if not 1 <= count <= len(sizes):
        raise InputError(
            f"pp={count}: expected from 1 to {len(sizes)} stages, the model's number of layers: a stage needs a layer"
        )
    sizes[0] += ends[0]
    sizes[-1] += ends[1]
    starts = [*balance_shares(tuple(sizes), count), len(sizes)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def balance_shares(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Returns the starts of `count` contiguous shares that minimize the largest share, then the sum of squares."""
    total = [0, *accumulate(sizes)]

    @cache
    def best(stop: int, shares: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        if shares == 1:
            return (total[stop], total[stop] ** 2), (0,)
        options = []
        for start in range(shares - 1, stop):
            (largest, squares), starts = best(start, shares - 1)
            size = total[stop] - total[start]
            options.append(((max(largest, size), squares + size**2), (*starts, start)))
        return min(options)

    return best(len(sizes), count)[1]


def load_stage(
    folder: Path | str,
    auto_class: AutoClass,
    index: int,
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
    times: PartTimes | None = None,
) -> PreTrainedModel:
    """Loads stage `index` of `count` of a checkpoint, in eval mode: the stock class without the other stages' modules.

    No weights of other stages are read. Weights have the names of the complete model, so that the union of the stages'
    state dicts is the model's state dict. If the head is tied to the embeddings, the first and the last stage both have
    them.

    Args:
        folder: A local checkpoint in safetensors.
        auto_class: An auto class such as `AutoModelForCausalLM`.
        index: Index of the stage.
        count: Number of stages.
        dtype: Dtype of all weights.
        times: By which layers are divided, see `split_layers`; the same on every process.

    Raises:
        InputError: The files lack a weight of this stage, the family can't be split into stages, or there are more
            stages than layers.
    """
    with torch.device("meta"):
        full_model = auto_class.from_config(AutoConfig.from_pretrained(folder))
    stock_class: Any = type(full_model)  # its constructor's arguments are those of from_pretrained
    stages = split_layers(full_model, count, times)

    def build(self: PreTrainedModel, *args: object, **kwargs: object) -> None:
        stock_class.__init__(self, *args, **kwargs)
        reduce_to_stage(self, stages, index)
        self._keys_to_ignore_on_load_unexpected = {".*"}  # no warnings about other stages' weights

    def initialize_weights(self: PreTrainedModel, module: nn.Module) -> None:
        # Some families initialize their head's weights here, which this stage may lack; and buffers.
        is_absent = any(isinstance(each, _AbsentModule) for each in module.children())
        if any(True for _ in module.buffers(False)) or not is_absent:
            stock_class._init_weights(self, module)

    # transformers looks up weight conversions by the class name.
    methods = {"__init__": build, "_init_weights": initialize_weights, "__module__": stock_class.__module__}
    stage_class: Any = type(stock_class.__name__, (stock_class,), methods)
    stage, report = stage_class.from_pretrained(folder, dtype=dtype, use_safetensors=True, output_loading_info=True)
    stage.__class__ = stock_class
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"]))
        raise InputError(
            f"checkpoint {str(folder)!r}: expected weights {names}, found none in the safetensors files: pipeline "
            f"stage {index} of {count} would start with random ones"
        )
    return cast(PreTrainedModel, stage)


def reduce_to_stage(model: PreTrainedModel, stages: list[range], index: int) -> None:
    """Removes from `model` everything that doesn't belong to the stage; its layers keep their numbers.

    Args:
        model: The full model, possibly on the meta device.
        stages: Layers of all stages, from `split_layers`.
        index: Index of the stage.

    Raises:
        InputError: The family can't be split into stages.
    """
    parts = find_parts(model)
    ties = [source for target, source in model.all_tied_weights_keys.items() if _ties_ends(parts, target, source)]
    table = model.get_input_embeddings()
    embeddings = next(f"{name}.weight" for name, each in model.named_modules() if each is table)
    boundary = StageBoundary(index, stages, tuple(ties) if len(stages) > 1 else (), embeddings)
    own_layers = boundary.layers
    shared_modules = {source.rpartition(".")[0] for source in ties} if boundary.is_last else set()
    layers = cast(nn.ModuleList, model.get_submodule(parts.layers))
    for number in range(len(layers)):
        if number not in own_layers:
            layers[number] = _AbsentModule(boundary, _BEFORE if number < own_layers.start else _AFTER, layers[number])
    for name in () if boundary.is_first else parts.before:
        _remove_module(model, name, boundary, _BEFORE, shared_modules)
    for name in () if boundary.is_last else parts.after:
        _remove_module(model, name, boundary, _AFTER, set())
    boundary.attach(model.base_model, layers)
    remaining = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {a: b for a, b in model.all_tied_weights_keys.items() if {a, b} <= remaining}
    model.boundary = boundary  # type: ignore[assignment]


def _ties_ends(parts: ModelParts, target: str, source: str) -> bool:
    """Returns whether a tied weight connects a module after the layers with one before them."""
    is_after = any(_is_inside(target, part) for part in parts.after)
    return is_after and any(_is_inside(source, part) for part in parts.before)


def _remove_module(
    model: PreTrainedModel, name: str, boundary: StageBoundary, phase: str, shared_modules: set[str]
) -> None:
    """Replaces module `name` by a placeholder.

    Modules among `shared_modules` (`name` itself or modules inside it) stay for their weights; their outputs are not
    used.
    """
    if name in shared_modules:
        return
    absent = _AbsentModule(boundary, phase, model.get_submodule(name))
    for each in shared_modules:
        if _is_inside(each, name):
            absent.add_module(each.removeprefix(f"{name}."), model.get_submodule(each))
    model.set_submodule(name, absent)


def get_boundary(model: PreTrainedModel) -> StageBoundary | None:
    """Returns the boundary of a pipeline stage; None of a full model."""
    boundary = getattr(model, "boundary", None)
    return boundary if isinstance(boundary, StageBoundary) else None


def find_boundary(stage: PreTrainedModel) -> StageBoundary:
    """Returns the boundary that `load_stage` attached to the stage.

    Raises:
        InputError: The model is not a pipeline stage.
    """
    boundary = get_boundary(stage)
    if boundary is None:
        raise InputError(
            f"{type(stage).__name__}: expected a pipeline stage, found a full model; load it with load_stage"
        )
    return boundary
