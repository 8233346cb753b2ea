"""Construction of one pipeline stage of a model: choice of its layers, and loading of only its weights."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from distill.errors import InputError

BEFORE, INSIDE, AFTER = "before its layers", "in its layers", "after its layers"


@dataclass(frozen=True)
class ModelParts:
    """Names of a model's list of layers and of the modules with weights that run before and after the layers."""

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class Relay:
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
        self.layers, self.first, self.last = stages[index], index == 0, index == len(stages) - 1
        self.kept: dict[int, list[Tensor]] = {}
        self.place, self.hidden = BEFORE, torch.empty(0)

    def attach(self, body: nn.Module, layers: nn.ModuleList) -> None:
        """Registers hooks on the stage's layers, in a model whose other layers were replaced by `Absent`."""
        layers[self.layers[0]].register_forward_pre_hook(self.enter, with_kwargs=True)
        for number in self.layers[:-1]:
            layers[number].register_forward_hook(partial(self.keep, number + 1))
        layers[self.layers[-1]].register_forward_hook(self.leave)
        if self.last:
            body.register_forward_hook(partial(self.keep, len(layers)))

    def start(self, received: Tensor, kept: dict[int, list[Tensor]]) -> None:
        """Prepares a forward pass with the received tensor (token ids in the first stage) and the dict that collects
        hidden states.
        """
        self.place, self.hidden, self.kept = BEFORE, received, kept

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before the stage's first layer that replaces its input by the received hidden state, except in the
        first stage.
        """
        self.place = INSIDE
        if self.first:
            self.keep(0, layer, args, args or (kwargs["hidden_states"],))
            return None
        return ((self.hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": self.hidden})

    def keep(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if number in self.kept:
            self.kept[number].append(output if isinstance(output, Tensor) else output[0])

    def leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Hook after the stage's last layer that stores its output."""
        self.place, self.hidden = AFTER, output if isinstance(output, Tensor) else output[0]
        if not self.last:  # the model's last hidden state is the one after its last norm
            self.keep(self.layers.stop, layer, args, output)

    def finish(self) -> Tensor:
        """Returns the hidden state after the stage's last layer and drops the reference, which would keep its autograd
        graph alive.
        """
        hidden, self.hidden, self.kept = self.hidden, torch.empty(0), {}
        return hidden


class Absent(nn.Module):
    """Placeholder for another stage's module, with its attributes (such as a layer's kind of attention) but no
    weights.
    """

    def __init__(self, relay: Relay, place: str, module: nn.Module):
        super().__init__()
        vars(self).update({name: value for name, value in vars(module).items() if name not in vars(self)})
        self.relay, self.place = relay, place

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # Otherwise a module that is defined before the layers but runs after them would be skipped silently.
        if self.relay.place != self.place:
            raise InputError(
                f"pipeline stage {self.relay.index}: a module left out {self.place} was called {self.relay.place}: "
                "this family runs its modules in another order than it defines them, and can't be cut into stages"
            )
        return self.relay.hidden


def find_parts(model: PreTrainedModel) -> ModelParts:
    """Returns the names of a model's parts.

    Raises:
        InputError: The family has no single list of layers, or has weights that belong neither to the layers nor
            clearly before or after them (relative positions shared by all layers, for example).
    """
    body: Any = model.base_model
    prefix = "" if body is model else f"{model.base_model_prefix}."
    count = getattr(model.config, "num_hidden_layers", None)
    found = [name for name, each in body.named_modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    found = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(found) != 1:
        raise InputError(
            f"{type(model).__name__}: expected one list of {count} layers, found {len(found)}: "
            "this family can't be cut into pipeline stages"
        )
    children = [f"{prefix}{name}" for name, _ in body.named_children()]
    at = children.index(f"{prefix}{found[0].split('.')[0]}")
    heads = [] if body is model else [name for name, each in model.named_children() if each is not body]
    parts = ModelParts(
        prefix + found[0], having_weights(model, children[:at]), having_weights(model, children[at + 1 :] + heads)
    )
    known = (parts.layers, *parts.before, *parts.after)
    others = [name for name, _ in model.named_parameters() if not any(inside(name, part) for part in known)]
    if others:
        raise InputError(
            f"{type(model).__name__}: {others[0]} lies beside the layers, and any of them may use it: "
            "this family can't be cut into pipeline stages"
        )
    return parts


def having_weights(model: nn.Module, names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if any(True for _ in model.get_submodule(name).parameters()))


def inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def size_of(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def freeze_embeddings(model: PreTrainedModel) -> None:
    """Freezes the token embeddings of a model, or of a pipeline stage that has them.

    If the head is tied to the embeddings, the last stage has them too, and they are frozen on both.
    """
    relay: Any = getattr(model, "relay", None)
    if relay is None:
        model.get_input_embeddings().weight.requires_grad_(False)
        return
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name == relay.embeddings:
            weight.requires_grad_(False)


def stage_layers(model: PreTrainedModel, count: int) -> list[range]:
    """Returns the layers of each of `count` stages, chosen to minimise the parameters of the largest stage, including
    embeddings and head. The model may be on the meta device.

    Raises:
        InputError: There are more stages than layers, or the family can't be split into stages.
    """
    parts = find_parts(model)
    sizes = [size_of(layer) for layer in model.get_submodule(parts.layers).children()]
    if not 1 <= count <= len(sizes):
        raise InputError(f"pp={count}: a stage needs at least one layer, and the model has {len(sizes)}")
    sizes[0] += sum(size_of(model.get_submodule(name)) for name in parts.before)
    sizes[-1] += sum(size_of(model.get_submodule(name)) for name in parts.after)
    starts = [*even_starts(tuple(sizes), count), len(sizes)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def even_starts(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Returns the starts of `count` contiguous shares that minimise the largest share, then the sum of squares."""
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
    folder: Path | str, auto_class: Any, index: int, count: int, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Loads stage `index` of `count` of a checkpoint, in eval mode: the stock class without the other stages' modules.

    No weights of other stages are read. Weights have the names of the complete model, so that the union of the stages'
    state dicts is the model's state dict. If the head is tied to the embeddings, the first and the last stage both have
    them.

    Args:
        folder: A local checkpoint in safetensors.
        auto_class: An auto class such as `AutoModelForCausalLM`.

    Raises:
        InputError: The files lack a weight of this stage, the family can't be split into stages, or there are more
            stages than layers.
    """
    with torch.device("meta"):
        whole = auto_class.from_config(AutoConfig.from_pretrained(folder))
    kind: Any = type(whole)
    stages = stage_layers(whole, count)

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        keep_stage(self, stages, index)
        self._keys_to_ignore_on_load_unexpected = {".*"}  # no warnings about other stages' weights

    def fill(self: Any, module: nn.Module) -> None:
        # Some families initialise their head's weights here, which this stage may lack; buffers are initialised here
        # too.
        if any(True for _ in module.buffers(False)) or not any(isinstance(each, Absent) for each in module.children()):
            kind._init_weights(self, module)

    # transformers looks up weight conversions by the class name.
    parts = {"__init__": build, "_init_weights": fill, "__module__": kind.__module__}
    cutting: Any = type(kind.__name__, (kind,), parts)
    stage, report = cutting.from_pretrained(folder, dtype=dtype, use_safetensors=True, output_loading_info=True)
    stage.__class__ = kind
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"]))
        raise InputError(
            f"{str(folder)!r}: no weights {names} in the safetensors files: pipeline stage {index} of {count} would "
            "start with random ones"
        )
    return stage


def keep_stage(model: PreTrainedModel, stages: list[range], index: int) -> None:
    """Removes from `model` everything that doesn't belong to the stage; its layers keep their numbers."""
    parts = find_parts(model)
    ties = [source for target, source in model.all_tied_weights_keys.items() if separated(parts, target, source)]
    table = model.get_input_embeddings()
    embeddings = next(f"{name}.weight" for name, each in model.named_modules() if each is table)
    relay = Relay(index, stages, tuple(ties) if len(stages) > 1 else (), embeddings)
    layers, kept = relay.layers, {source.rpartition(".")[0] for source in ties} if relay.last else set()
    slots: Any = model.get_submodule(parts.layers)
    for number in range(len(slots)):
        if number not in layers:
            slots[number] = Absent(relay, BEFORE if number < layers.start else AFTER, slots[number])
    for name in () if relay.first else parts.before:
        leave_out(model, name, relay, BEFORE, kept)
    for name in () if relay.last else parts.after:
        leave_out(model, name, relay, AFTER, set())
    relay.attach(model.base_model, slots)
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {a: b for a, b in model.all_tied_weights_keys.items() if {a, b} <= own}
    model.relay = relay  # type: ignore[assignment]


def separated(parts: ModelParts, target: str, source: str) -> bool:
    """Returns whether a tied weight connects a module after the layers with one before them."""
    return any(inside(target, part) for part in parts.after) and any(inside(source, part) for part in parts.before)


def leave_out(model: PreTrainedModel, name: str, relay: Relay, place: str, kept: set[str]) -> None:
    """Replaces module `name` by an `Absent`, except that modules of `kept` (`name` itself or modules inside it) stay
    for their weights; their outputs are not used.
    """
    if name in kept:
        return
    absent = Absent(relay, place, model.get_submodule(name))
    for each in kept:
        if inside(each, name):
            absent.add_module(each.removeprefix(f"{name}."), model.get_submodule(each))
    model.set_submodule(name, absent)


def relay_of(stage: PreTrainedModel) -> Relay:
    """Returns the relay that `load_stage` attached to the stage.

    Raises:
        InputError: The model is not a pipeline stage.
    """
    relay: Any = getattr(stage, "relay", None)
    if relay is None:
        raise InputError(f"{type(stage).__name__}: a whole model, no pipeline stage; load it with load_stage")
    return relay
