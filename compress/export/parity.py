"""Each product of a deployed graph against the layer it stands for, on the very input that it gets in the graph.

Whole models can't be compared so: where activations are rounded, a difference of the last bit now and then moves a
number by a whole step, and from there on both compute on different numbers.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from compress.export.onnx import open_session
from compress.quantize.layers import QuantizedLinear


@torch.no_grad()
def layer_differences(
    file: Path, products: Mapping[str, tuple[str, str]], reference: nn.Module, inputs: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Largest difference of each product from its layers', over the largest of its values (at least 1).

    Args:
        file: An ONNX file that `round_graph` wrote.
        products: Names of a product's input and output by layer, as it said.
        reference: The model with layers that round.
        inputs: A padded batch, each [batch, length] int64.
    """
    import onnx

    model = onnx.load(str(file))
    wanted = list(dict.fromkeys(name for pair in products.values() for name in pair))
    own = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in own)
    session = open_session(model.SerializeToString(), threads=1)
    given = {value.name: inputs[value.name] for value in session.get_inputs()}
    values = dict(zip(wanted, session.run(wanted, given), strict=True))
    found = {}
    for name, (x, y) in products.items():
        layers = [reference.get_submodule(each) for each in name.split("+")]
        expected = torch.cat([product(layer, torch.from_numpy(values[x])) for layer in layers], dim=-1)
        difference = (torch.from_numpy(values[y]) - expected).abs().max()
        found[name] = float(difference / expected.abs().max().clamp(min=1))
    return found


def product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(layer, QuantizedLinear)
    return F.linear(layer.rounded_input(x), layer.rounded_weight())
