"""Dynamic int8 for ONNX Runtime: 8-bit weights and embeddings, activations quantized in each call."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compress.export.common.quiet import quiet
from compress.export.onnx.fuse import read_attribute, remove_unused, replace_nodes
from compress.export.onnx.nodes import Writer
from compress.export.onnx.quantized import look_up
from compress.quantize.schemes import INT8

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_PRODUCTS = ("MatMul", "Gemm", "Attention")


@cache
def products_saturate() -> bool:
    """Returns whether byte products saturate on this processor, found by multiplying the largest ones.

    The test runs in ONNX Runtime instead of reading the processor's flags, so that it covers ONNX Runtime's own choice
    of kernel on every platform, including under a hypervisor or emulator. OpenVINO's products saturate on the same
    processors.
    """
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    largest = np.full((64, 8), 127, np.int8)
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [1, len(largest)])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, [1, 8])
    node = helper.make_node("MatMulInteger", ["x", "weight"], ["y"])
    graph = helper.make_graph([node], "products", [x], [y], [numpy_helper.from_array(largest, "weight")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"x": np.full((1, len(largest)), 255, np.uint8)})
    return bool((output != 255 * 127 * len(largest)).any())


def quantize_int8(source: Path, target: Path, *, reduce_range: bool = False) -> None:
    """Quantizes a float32 ONNX file to int8 weights, with one scale per output channel (Attention with 7 bits).

    Activation scales are computed in each call from the smallest and largest value of the tensor. Nothing is
    calibrated.

    Args:
        source: A file written by `fuse_operators`, or any float32 ONNX file.
        target: Where to write.
        reduce_range: Whether weights of products have 7 bits, for processors whose products saturate.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    quantize_tables(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with quiet():  # the quantizer recommends preprocessing that the export has done
        quantize_dynamic(
            model,
            str(target),
            op_types_to_quantize=list(_PRODUCTS),
            per_channel=True,
            reduce_range=reduce_range,
            weight_type=QuantType.QInt8,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )


def quantize_tables(model: "ModelProto") -> None:
    """Rewrites all lookups in float32 tables as lookups of bytes, in place, with one scale per row.

    A single scale, as ONNX Runtime's quantizer uses, would be that of the largest row. A table with one column stays in
    float32: its scales alone would be as large.
    """
    from onnx import TensorProto, numpy_helper

    graph, writer = model.graph, Writer()
    names = {node.input[0] for node in graph.node if looks_up_rows(node)}
    tables = {
        each.name: quantize_rows(numpy_helper.to_array(each))
        for each in graph.initializer
        if each.name in names and each.data_type == TensorProto.FLOAT and len(each.dims) == 2 and each.dims[1] > 1
    }
    for node in graph.node:
        if looks_up_rows(node) and node.input[0] in tables:
            look_up(writer, node, node.input[0], *tables[node.input[0]])
        else:
            writer.nodes.append(node)
    replace_nodes(graph, writer.nodes)
    graph.initializer.extend(writer.constants.values())
    remove_unused(graph)  # with the shapes recorded before the fusion, which mislead ONNX Runtime's quantizer


def looks_up_rows(node: "NodeProto") -> bool:
    """Returns whether a node is a Gather along the first axis."""
    axis = read_attribute(node, "axis")
    return node.op_type == "Gather" and (axis is None or axis.i == 0)


def quantize_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest integers of a table [rows, columns], int8, and the rows' scales [rows, 1], float32."""
    import torch

    from compress.quantize.grid import compute_weight_scales, quantize_weight

    weight = torch.tensor(table)
    scales = compute_weight_scales(weight, INT8)
    return quantize_weight(weight, scales, INT8).numpy(), scales.numpy()
