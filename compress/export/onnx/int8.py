"""Dynamic int8 for ONNX Runtime: 8-bit weights and embeddings, activations quantized in each call."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compress.export.common.quiet import quiet

if TYPE_CHECKING:
    from onnx import ModelProto

_PRODUCTS = ("MatMul", "Gemm", "Attention")
_TABLES = ("Gather",)  # ONNX's embedding lookup


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
    target.parent.mkdir(parents=True, exist_ok=True)
    # tables are looked up, not multiplied: they keep 8 bits
    for operators, bits in ((_TABLES, False), (_PRODUCTS, True)) if reduce_range else ((_TABLES + _PRODUCTS, False),):
        before = tensor_names(model)
        del model.graph.value_info[:]  # shapes recorded before the fusion mislead the quantizer
        with quiet():  # the quantizer recommends preprocessing that the export has done
            quantize_dynamic(
                model,
                str(target),
                op_types_to_quantize=list(operators),
                per_channel=True,
                reduce_range=bits,
                weight_type=QuantType.QInt8,
                extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
            )
        model = onnx.load(str(target))
        if operators == _TABLES:  # else the second pass would reuse the names of the table's integers
            rename_tensors(model, {name: f"table/{name}" for name in tensor_names(model) - before})


def tensor_names(model: "ModelProto") -> set[str]:
    """Returns the names of all tensors of a graph."""
    graph = model.graph
    return {name for node in graph.node for name in (*node.input, *node.output)} | {w.name for w in graph.initializer}


def rename_tensors(model: "ModelProto", names: dict[str, str]) -> None:
    """Renames tensors in all nodes and constants."""
    for weight in model.graph.initializer:
        weight.name = names.get(weight.name, weight.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
