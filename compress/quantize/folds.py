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

from compress.blocks import find_block
from distill.checkpoint.custom_models import head_width
from distill.checkpoint.outputs import read_logits

SUM_TOLERANCE = 1e-4  # of the largest output, for a different order of summation


@dataclass(frozen=True)
class Fold:
    """Linear layers whose inputs can be rescaled, and the layer that absorbs the scales.

    Args:
        producer: Name of the norm or linear layer that produces the inputs and absorbs the scales.
        consumers: Names of the linear layers that take them.
        shift: Constant that a norm adds to its weight before multiplying, such as 1 in Gemma.
    """

    producer: str
    consumers: tuple[str, ...]
    shift: float = 0.0


@torch.no_grad()
def find_folds(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Fold]:
    """Returns every fold that preserves the model's logits, tested by applying random scales to each candidate.

    Args:
        model: In eval mode and float32; restored afterwards, up to rounding.
        batch: A small batch of model inputs.
    """
    expected = read_logits(model(**batch))
    folds: list[Fold] = []
    generator = torch.Generator().manual_seed(0)
    for fold in _generate_candidates(model, batch):
        if any(fold.consumers == each.consumers for each in folds):
            continue  # both factors of a gated product could absorb the scales: once is enough
        inputs = get_weight(model, fold.consumers[0]).shape[1]
        scales = tie_scales(torch.rand(inputs, generator=generator) + 0.5, model, fold)
        apply_scales(model, fold, scales)
        difference = (read_logits(model(**batch)) - expected).abs().max()
        apply_scales(model, fold, 1 / scales)
        if difference <= SUM_TOLERANCE * expected.abs().max():
            folds.append(fold)
    return folds


@torch.no_grad()
def apply_scales(model: nn.Module, fold: Fold, scales: Tensor) -> None:
    """Multiplies the consumers' weights by `scales` [inputs] and divides the producer's outputs by them, in place."""
    for name in fold.consumers:
        get_weight(model, name).mul_(scales)
    weight, bias = get_weight(model, fold.producer), getattr(model.get_submodule(fold.producer), "bias", None)
    outputs = weight.shape[0]
    if outputs != len(scales):
        scales = _untie_scales(scales, outputs, _find_tied_width(model, outputs))
    if weight.dim() == 1:
        weight.add_(fold.shift).div_(scales).sub_(fold.shift)
    else:
        weight.div_(scales[:, None])
    if bias is not None:
        bias.div_(scales)


def tie_scales(scales: Tensor, model: nn.Module, fold: Fold) -> Tensor:
    """Returns scales [inputs] that the producer can absorb.

    Input heads that share a value head get the mean of their scales.
    """
    outputs = get_weight(model, fold.producer).shape[0]
    if outputs == len(scales):
        return scales
    width = _find_tied_width(model, outputs)
    heads = scales.view(outputs // width, -1, width).mean(1, keepdim=True)
    return heads.expand(-1, len(scales) // outputs, -1).reshape(-1)


def get_weight(model: nn.Module, name: str) -> Tensor:
    """Returns the weight of the layer of this name."""
    return cast(Tensor, model.get_submodule(name).weight)


def _generate_candidates(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Fold]:
    """Yields candidate folds: a norm and the linear layers it feeds, or linear layers of a block with fitting sizes."""
    norms = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Norm") and hasattr(m, "weight")}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    outputs, inputs = _record_tensors(model, norms, linears, batch)
    consumers: dict[int, list[str]] = {}
    for name, tensor in inputs.items():
        consumers.setdefault(id(tensor), []).append(name)
    for tensor_id, names in consumers.items():
        if tensor_id in outputs:
            producer = outputs[tensor_id][0]
            yield Fold(producer, tuple(names))
            yield Fold(producer, tuple(names), shift=1.0)
            continue
        width = linears[names[0]].in_features
        for other, layer in linears.items():
            if find_block(other) == find_block(names[0]) and other not in names and width % layer.out_features == 0:
                yield Fold(other, tuple(names))


def _record_tensors(
    model: nn.Module, norms: Mapping[str, nn.Module], linears: Mapping[str, nn.Module], batch: Mapping[str, Tensor]
) -> tuple[dict[int, tuple[str, Tensor]], dict[str, Tensor]]:
    """Runs the model and returns the norms' outputs, (name, tensor) by id, and the linear layers' inputs by name.

    Both keep the tensors alive, so that their ids aren't reused.
    """
    outputs: dict[int, tuple[str, Tensor]] = {}
    inputs: dict[str, Tensor] = {}
    hooks = [m.register_forward_hook(partial(_record_output, outputs, n)) for n, m in norms.items()]
    hooks += [m.register_forward_pre_hook(partial(_record_input, inputs, n)) for n, m in linears.items()]
    try:
        model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, inputs


def _record_output(
    outputs: dict[int, tuple[str, Tensor]], name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    outputs[id(output)] = name, output


def _record_input(recorded: dict[str, Tensor], name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    recorded[name] = inputs[0]


def _find_tied_width(model: nn.Module, outputs: int) -> int:
    """Returns the number of outputs per tied group: the head width."""
    width = head_width(cast(PreTrainedModel, model).config)
    return width if outputs % width == 0 else outputs


def _untie_scales(scales: Tensor, outputs: int, width: int) -> Tensor:
    """Returns the scales [outputs] of the producer, one per tied group of inputs."""
    return scales.view(outputs // width, -1, width)[:, 0].reshape(-1)
