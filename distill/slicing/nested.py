"""A family of models in one set of weights: slices of the largest model, each within the one before it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from distill.checkpoint.custom_models import load_model_folder
from distill.checkpoint.layers import find_layer_stack
from distill.errors import InputError
from distill.slicing.build import prune
from distill.slicing.shape import Shape
from distill.slicing.tracing.axes import Axis
from distill.slicing.tracing.classify import find_layer
from distill.slicing.tracing.trace import find_axes
from distill.slicing.weights import Weights, cut_weights, list_cuts, select_layers

SLICES = "nested.json"


@dataclass(frozen=True, eq=False)
class ModelSlice:
    """A part of a model's weights that is a model itself.

    Args:
        axes: The model's axes.
        shape: The layers and units of the slice.
        stack: Name of the list of the model's layers.
    """

    axes: Sequence[Axis]
    shape: Shape
    stack: str

    @classmethod
    def of(cls, model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> "ModelSlice":
        """Returns the slice of a model with this shape."""
        return cls(axes, shape, find_layer_stack(model))

    def cut(self, weights: Mapping[str, Tensor]) -> Weights:
        """Returns the slice's weights under the names that they have in the pruned model.

        They are differentiable functions of `weights`, those of the whole model: gradients reach the units of the
        slice, and are zero elsewhere.
        """
        return select_layers(cut_weights(weights, list_cuts(self.axes, self.shape.kept)), self.stack, self.shape.layers)


def compose_shapes(first: Shape, second: Shape) -> Shape:
    """Returns the shape that prunes as `first` does and then as `second`, whose numbers are those of the pruned model.

    Args:
        first: Shape of a slice of a model.
        second: Shape of a slice of that slice.
    """
    layers = tuple(first.layers[i] for i in second.layers)
    kept = {name: units for name, units in first.kept.items() if find_layer(name, "layers") in (None, *layers)}
    for name, units in second.kept.items():
        layer = find_layer(name, "layers")
        old = name if layer is None else name.replace(f".{layer}.", f".{first.layers[layer]}.", 1)
        kept[old] = first.kept[old][units] if old in first.kept else units
    return Shape(layers, kept)


def write_slices(folder: Path, slices: Mapping[str, Shape]) -> None:
    """Writes the index of a model's slices beside it: name, such as `10x`, -> shape, the whole model first."""
    content = {name: shape.to_dict() for name, shape in slices.items()}
    (folder / SLICES).write_text(json.dumps({"slices": content}) + "\n")


def read_slices(folder: Path) -> dict[str, Shape]:
    """Returns name -> shape of the slices of the model in a folder, the whole model first.

    Raises:
        InputError: The folder has no index of slices, or a damaged one.
    """
    file = folder / SLICES
    try:
        content = json.loads(file.read_text())
        return {name: Shape.from_dict(shape) for name, shape in content["slices"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise InputError(
            f"{str(file)!r}: expected the index of a nested family's slices, found none that can be read ({error}): "
            "only the folder `nested` of a run with --nested has one"
        ) from error


def load_slice(folder: Path | str, name: str) -> PreTrainedModel:
    """Returns a slice of a nested family, as the student of that speed is saved on its own.

    Args:
        folder: The folder `nested` of a run.
        name: Name of the slice, such as `10x`.

    Raises:
        InputError: There is no such slice.
    """
    folder = Path(folder)
    slices = read_slices(folder)
    if name not in slices:
        raise InputError(f"{str(folder)!r}: expected one of the slices {', '.join(slices)}, found {name!r}")
    model = load_model_folder(folder)
    return prune(model, find_axes(model), slices[name])
