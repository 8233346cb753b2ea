"""Matching of a graph's products to model layers, by the rows of their weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.errors import ExportError


@dataclass(frozen=True)
class Layer:
    """Quantized weights of a layer.

    Args:
        weight: On the grid, float32 [outputs, inputs].
        integers: The same as int8.
        scales: [outputs, groups].
        bits: Bits per weight.
        input_scales: `float`, `token`, `tensor` or `group`, as in `compress.quantize.schemes`; `table` for an
            embedding.
        grid: (scale, zero point) of inputs with a per-tensor scale.
    """

    weight: np.ndarray
    integers: np.ndarray
    scales: np.ndarray
    bits: int
    input_scales: str
    grid: tuple[float, int] | None

    @property
    def grouping_key(self) -> tuple[Any, ...]:
        """Properties that layers must share to be computed by one product."""
        return self.bits, self.input_scales, self.grid, self.scales.shape[1]


def list_quantized_weights(model: Any, quantization: Mapping[str, Any]) -> dict[str, Layer]:
    """Returns the quantized weights of a converted model by layer name.

    `quantization` is the result of `compress.quantize.convert_quantized`.
    """
    layers = {}
    for name, quantized in quantization.items():
        weight, scheme = model.get_submodule(name).weight.detach(), quantized.scheme
        layers[name] = Layer(
            weight.numpy(),
            quantized.quantize(weight).numpy(),
            quantized.scales.numpy(),
            8 if scheme is None else scheme.stored_bits,
            "table" if scheme is None else scheme.input_scales,
            quantized.grid,
        )
    return layers


class RowIndex:
    """Index of weight rows, which finds the layers of a product even if a graph concatenates several."""

    def __init__(self, layers: Mapping[str, Layer]):
        self.layers = layers
        self.occurrences: dict[bytes, list[tuple[str, int]]] = {}
        for name, layer in layers.items():
            for number, row in enumerate(layer.weight):
                self.occurrences.setdefault(row.tobytes(), []).append((name, number))

    def find(self, weight: np.ndarray) -> tuple[Layer, list[str]] | None:
        """Returns the layer with the rows of `weight` [outputs, inputs], or several as one, and their names.

        The result is None if a row belongs to no layer.

        Raises:
            ExportError: Concatenated layers are quantized in different ways.
        """
        options = [self.occurrences.get(row.tobytes(), []) for row in np.ascontiguousarray(weight)]
        if not all(options):
            return None
        votes = Counter(name for each in options for name in {name for name, _ in each})
        chosen = [max(each, key=lambda occurrence: votes[occurrence[0]]) for each in options]
        names = list(dict.fromkeys(name for name, _ in chosen))
        keys = {self.layers[name].grouping_key for name in names}
        if len(keys) > 1:
            raise ExportError(f"onnx: {', '.join(names)} are one product, and quantized in {len(keys)} different ways")
        first = self.layers[names[0]]
        weight, whole, scales = (
            np.stack([getattr(self.layers[name], part)[number] for name, number in chosen])
            for part in ("weight", "integers", "scales")
        )
        return Layer(weight, whole, scales, first.bits, first.input_scales, first.grid), names
