"""Builder of nodes and constants for a rewritten ONNX graph."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Writer:
    """Nodes and constants of the new graph, in order."""

    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    shared: dict[tuple[Any, ...], str] = field(default_factory=dict)  # computes inputs shared by products once

    def add_constant(self, name: str, value: np.ndarray) -> str:
        """Adds a constant and returns its name."""
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def add_int4_constant(self, name: str, value: np.ndarray) -> str:
        """Adds a constant of 4-bit integers, two per byte, the first in the lower half."""
        from onnx import TensorProto, helper

        flat = np.append(value.flatten(), np.zeros(value.size % 2, np.int8)).astype(np.uint8) & 15
        packed = (flat[0::2] | flat[1::2] << 4).tobytes()
        self.constants[name] = helper.make_tensor(name, TensorProto.INT4, value.shape, packed, raw=True)
        return name

    def add_scalar(self, value: float, kind: Any = np.float32) -> str:
        """Adds a scalar constant and returns its name."""
        return self.add_constant(f"number_{np.dtype(kind).name}_{value!r}", np.asarray(value, kind))

    def add_node(self, operator: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node and returns the name of its output."""
        from onnx import helper

        self.nodes.append(helper.make_node(operator, list(inputs), [output], domain=domain, **attributes))
        return output

    def add_node_once(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Adds a node, or reuses an equal node added before, and returns its output."""
        key = (operator, *inputs, *sorted(attributes.items()))
        if key not in self.shared:
            self.shared[key] = self.add_node(operator, inputs, output, **attributes)
        return self.shared[key]
