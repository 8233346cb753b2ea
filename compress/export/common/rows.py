"""Which layer a product of a graph came from, told by the rows of its weight."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.errors import ArtefactError


@dataclass(frozen=True)
class Layer:
    """A layer's numbers.

    Args:
        weight: On the grid, float32 [outputs, inputs].
        integers: The same as int8.
        scales: [outputs, groups].
        bits: That a weight takes.
        inputs: `float`, `token` or `tensor`, as in `compress.quantize.schemes`; `table` of an embedding.
        grid: (scale, zero point) of the inputs where they are of a tensor.
    """

    weight: np.ndarray
    integers: np.ndarray
    scales: np.ndarray
    bits: int
    inputs: str
    grid: tuple[float, int] | None

    @property
    def how(self) -> tuple[Any, ...]:
        """What layers have to share for one product to do the work of both."""
        return self.bits, self.inputs, self.grid, self.scales.shape[1]


def layers_of(model: Any, rounding: Mapping[str, Any]) -> dict[str, Layer]:
    """The numbers of a converted model's layers by name; `rounding` is what `compress.quantize.convert` gave."""
    found = {}
    for name, rounded in rounding.items():
        weight, scheme = model.get_submodule(name).weight.detach(), rounded.scheme
        found[name] = Layer(
            weight.numpy(),
            rounded.stored(weight).numpy(),
            rounded.scales.numpy(),
            8 if scheme is None else scheme.stored,
            "table" if scheme is None else scheme.inputs,
            rounded.grid,
        )
    return found


class Rows:
    """Finds the layers that a product's weight is made of, row by row: a graph may hold several side by side."""

    def __init__(self, layers: Mapping[str, Layer]):
        self.layers = layers
        self.places: dict[bytes, list[tuple[str, int]]] = {}
        for name, layer in layers.items():
            for number, row in enumerate(layer.weight):
                self.places.setdefault(row.tobytes(), []).append((name, number))

    def find(self, weight: np.ndarray) -> tuple[Layer, list[str]] | None:
        """The layer, or several as one, whose outputs the rows of `weight` [outputs, inputs] give; None of no layer's.

        Raises:
            ArtefactError: Layers side by side that are rounded in different ways.
        """
        options = [self.places.get(row.tobytes(), []) for row in np.ascontiguousarray(weight)]
        if not all(options):
            return None
        votes = Counter(name for each in options for name in {name for name, _ in each})
        chosen = [max(each, key=lambda place: votes[place[0]]) for each in options]
        names = list(dict.fromkeys(name for name, _ in chosen))
        hows = {self.layers[name].how for name in names}
        if len(hows) > 1:
            raise ArtefactError(f"onnx: {', '.join(names)} are one product, and rounded in {len(hows)} different ways")
        first = self.layers[names[0]]
        weight, whole, scales = (
            np.stack([getattr(self.layers[name], part)[number] for name, number in chosen])
            for part in ("weight", "integers", "scales")
        )
        return Layer(weight, whole, scales, first.bits, first.inputs, first.grid), names
