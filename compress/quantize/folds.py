"""Search for places where channels can be rescaled without changing the model's output.

The inputs of a layer are divided by a scale per channel and its weights are multiplied by the same scales, which moves
activation outliers into weights, or gives weights that multiply large inputs finer steps. The division is free if the
layer that produces the inputs can absorb it: a norm before linear layers, values before the attention output
projection, the linear half of a gated unit before the last layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.blocks import block_of
from compress.prune.slicing.sizes import head_width
from distill.checkpoint.outputs import logits_of

SAME = 1e-4  # of the largest output: tolerance for a different order of summation


@dataclass(frozen=True)
class Fold:
    """Linear layers whose inputs can be rescaled, and the layer that absorbs the scales.

    Args:
        producer: Name of the norm or linear layer that produces the inputs and absorbs the scales.
        readers: Names of the linear layers that consume them.
        shift: Constant that a norm adds to its weight before multiplying, such as 1 in Gemma.
    """

    producer: str
    readers: tuple[str, ...]
    shift: float = 0.0


@torch.no_grad()
def find_folds(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Fold]:
    """Returns every fold that preserves the model's logits, tested by applying random scales to each candidate.

    Args:
        model: In eval mode and float32; restored afterwards.
        batch: A small batch of model inputs.
    """
    expected, found = logits_of(model(**batch)), []
    seeded = torch.Generator().manual_seed(0)
    for fold in candidate_folds(model, batch):
        inputs = weight_of(model, fold.readers[0]).shape[1]
        scales = tie_scales(torch.rand(inputs, generator=seeded) + 0.5, model, fold)
        apply_scales(model, fold, scales)
        moved = (logits_of(model(**batch)) - expected).abs().max()
        apply_scales(model, fold, 1 / scales)
        if moved <= SAME * expected.abs().max():
            found.append(fold)
    return found


def candidate_folds(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Fold]:
    """Yields candidate folds: a norm and the linear layers it feeds, or linear layers of a block with fitting sizes."""
    norms = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Norm") and hasattr(m, "weight")}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    made: dict[int, tuple[str, Tensor]] = {}  # keeps the tensors alive so that their ids aren't reused
    read: dict[str, Tensor] = {}
    hooks = [m.register_forward_hook(partial(note_output, made, n)) for n, m in norms.items()]
    hooks += [m.register_forward_pre_hook(partial(note_input, read, n)) for n, m in linears.items()]
    try:
        model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[int, list[str]] = {}
    for name, tensor in read.items():
        groups.setdefault(id(tensor), []).append(name)
    for tensor_id, names in groups.items():
        if tensor_id in made:
            producer = made[tensor_id][0]
            yield Fold(producer, tuple(names))
            yield Fold(producer, tuple(names), shift=1.0)
            continue
        inputs = linears[names[0]].in_features
        for other, layer in linears.items():
            if block_of(other) == block_of(names[0]) and other not in names and inputs % layer.out_features == 0:
                yield Fold(other, tuple(names))


def note_output(made: dict[int, tuple[str, Tensor]], name: str, module: nn.Module, given: object, out: Tensor) -> None:
    made[id(out)] = name, out


def note_input(read: dict[str, Tensor], name: str, module: nn.Module, given: tuple[Tensor, ...]) -> None:
    read[name] = given[0]


def tie_scales(scales: Tensor, model: nn.Module, fold: Fold) -> Tensor:
    """Returns scales [inputs] that the producer can absorb.

    Input heads that share a value head get the mean of their scales.
    """
    outputs = weight_of(model, fold.producer).shape[0]
    if outputs == len(scales):
        return scales
    width = tied_width(model, outputs)
    heads = scales.view(outputs // width, -1, width).mean(1, keepdim=True)
    return heads.expand(-1, len(scales) // outputs, -1).reshape(-1)


def tied_width(model: nn.Module, outputs: int) -> int:
    """Returns the number of outputs per tied group: the head width."""
    own = head_width(cast(PreTrainedModel, model).config)
    return own if outputs % own == 0 else outputs


def weight_of(model: nn.Module, name: str) -> Tensor:
    return cast(Tensor, model.get_submodule(name).weight)


@torch.no_grad()
def apply_scales(model: nn.Module, fold: Fold, scales: Tensor) -> None:
    """Multiplies the readers' weights by `scales` [inputs] and divides the producer's outputs by them, in place."""
    for name in fold.readers:
        weight_of(model, name).mul_(scales)
    weight, bias = weight_of(model, fold.producer), getattr(model.get_submodule(fold.producer), "bias", None)
    outputs = weight.shape[0]
    own = scales if outputs == len(scales) else untie_scales(scales, outputs, tied_width(model, outputs))
    if weight.dim() == 1:
        weight.add_(fold.shift).div_(own).sub_(fold.shift)
    else:
        weight.div_(own[:, None])
    if bias is not None:
        bias.div_(own)


def untie_scales(scales: Tensor, outputs: int, width: int) -> Tensor:
    """Returns the scales [outputs] of the producer, one per tied group of inputs."""
    return scales.view(outputs // width, -1, width)[:, 0].reshape(-1)
