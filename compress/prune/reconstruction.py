"""Reconstruction: the units that stay make up for the removed ones, by least squares on calibration texts."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CompressError
from compress.layer_inputs import CalibrationBatch, sum_layer_inputs
from distill.slicing import Axis, Shape, Slot

RIDGE = 0.01  # share of the mean of the diagonal, as in SparseGPT
Moments = dict[str, Tensor]  # layer -> sums of products of its inputs and 1, float64 [in + 1, in + 1]


@torch.no_grad()
def reconstruct(
    model: PreTrainedModel, axes: Sequence[Axis], shape: Shape, moments: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Returns a copy of the model whose layers, once pruned to `shape`, compute nearly what they do now.

    Changed are the layers that consume the heads and feed-forward units of the kept layers: see
    `reconstruct_weight`. Each is fitted to the inputs that it has in the unpruned model; a narrower hidden width and
    removed layers aren't made up for.

    Args:
        model: The model before it is pruned.
        axes: Its axes.
        shape: The layers and units that `prune` will keep.
        moments: See `measure_moments`.

    Source: Kurtić et al. 2023, ZipLM (arXiv 2302.04089), section 3.1, whose updates, one structure after another, have
    this solution for a given choice of units; here the bias is fitted too, and the units are those of the search.
    """
    changed = copy.deepcopy(model)
    for axis in axes:
        kept_units = shape.kept.get(axis.name)
        if kept_units is None or len(kept_units) == axis.units or axis.layer not in shape.layers:
            continue
        for name, slot in _find_consumers(axis):
            layer: Any = changed.get_submodule(name)
            weight = layer.weight if slot.dim == 1 else layer.weight.T  # GPT-2's layers are [in, out]
            coordinates = axis.coordinates(slot, kept_units.cpu())
            new, shift = reconstruct_weight(weight, moments[name], coordinates, centred=layer.bias is not None)
            weight[:, coordinates] = new
            if layer.bias is not None:
                layer.bias += shift
    return changed


def measure_moments(model: PreTrainedModel, axes: Sequence[Axis], batches: Iterable[CalibrationBatch]) -> Moments:
    """Returns the moments of the inputs of every layer that consumes heads or feed-forward units.

    Args:
        model: The model before it is pruned.
        axes: Its axes.
        batches: Its inputs; padding isn't counted.

    Raises:
        CompressError: No batch reaches one of the layers.
    """
    names = {name for axis in axes for name, _ in _find_consumers(axis)}
    layers = {name: model.get_submodule(name) for name in sorted(names)}
    return sum_layer_inputs(model, layers, batches, _multiply_with_one)


def reconstruct_weight(
    weight: Float[Tensor, "out in"],
    moments: Float[Tensor, "in_and_1 in_and_1"],
    kept_inputs: Int[Tensor, "n"],
    *,
    centred: bool = True,
    ridge: float = RIDGE,
) -> tuple[Float[Tensor, "out n"], Float[Tensor, "out"]]:
    """Returns the weights of the kept inputs and the change of the bias with which a layer's outputs change least.

    The squared change of the outputs is least over the texts of the moments, plus `ridge` times that of the weights,
    so that inputs without variance keep their weights.

    Args:
        weight: The layer's weight.
        moments: Sums of products of its inputs and 1, see `measure_moments`.
        kept_inputs: The inputs that stay, ascending.
        centred: Whether the layer has a bias that can change.
        ridge: Share of the mean variance of the inputs that is added to each (ridge regression).

    Raises:
        CompressError: The moments aren't those of such inputs, or not finite.
    """
    inputs = weight.shape[1]
    if moments.shape != (inputs + 1, inputs + 1) or not moments.isfinite().all() or moments[-1, -1] < 1:
        raise CompressError(
            f"moments: expected finite sums of products [{inputs + 1}, {inputs + 1}] of at least one token, found "
            f"{list(moments.shape)}: the removed inputs can't be made up for"
        )
    mean = moments[-1, :-1] / moments[-1, -1]
    spread = moments[:-1, :-1] / moments[-1, -1] - (mean.outer(mean) if centred else 0)
    removed = torch.ones(inputs, dtype=torch.bool)
    removed[kept_inputs] = False
    variance = spread.diagonal().mean().clamp_min(1e-12)
    regularized = spread[kept_inputs][:, kept_inputs] + ridge * variance * torch.eye(len(kept_inputs))
    lost = weight.double()[:, removed]
    added = torch.linalg.solve(regularized, spread[kept_inputs][:, removed] @ lost.T).T
    shift = (
        lost @ mean[removed] - added @ mean[kept_inputs] if centred else torch.zeros(len(weight), dtype=torch.float64)
    )
    return (weight.double()[:, kept_inputs] + added).to(weight.dtype), shift.to(weight.dtype)


def save_moments(file: Path, moments: Moments) -> None:
    """Writes moments as float32."""
    save_file({name: value.float().contiguous() for name, value in moments.items()}, file)


def load_moments(file: Path) -> Moments:
    """Reads what `save_moments` wrote, as float64."""
    return {name: value.double() for name, value in load_file(file).items()}


def _multiply_with_one(rows: Tensor) -> Tensor:
    extended = nn.functional.pad(rows, (0, 1), value=1.0)
    return extended.T @ extended


def _find_consumers(axis: Axis) -> Iterator[tuple[str, Slot]]:
    """Yields the layers that take the units of heads or of a feed-forward part as inputs."""
    if axis.kind in ("heads", "ffn"):
        for slot in axis.slots:
            name, _, kind = slot.parameter.rpartition(".")
            if slot.role == "in" and kind == "weight":
                yield name, slot
