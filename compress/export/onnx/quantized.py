"""Rewriting of ONNX graphs whose weights are on a grid to integer products with the trained layers' exact numbers.

Exporters only support floats. The converted model, whose weights are multiples of their scales, is therefore exported
as it is; here each product is matched to its layer by its weights and rewritten with that layer's integers.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ExportError
from compress.export.common.rows import Layer, RowIndex
from compress.export.onnx import graph as float_graph
from compress.export.onnx.fuse import read_attribute, remove_unused, replace_nodes
from compress.export.onnx.nodes import Writer
from compress.quantize.schemes import LARGEST_LEVEL, SMALLEST_SCALE, find_input_group

_WriteProduct = Callable[[Writer, Any, Layer, str], tuple[str, str] | None]
_OPSET = 21  # the first with group-wise weight scales and 4 bits
MICROSOFT = "com.microsoft"
ROUNDED_INPUTS = 4  # accuracy level of MatMulNBits: inputs become bytes
PRODUCTS = "products"  # metadata key: layer, or several joined by + -> names of its input and output tensors


def quantize_graph(source: Path, target: Path, layers: Mapping[str, Layer]) -> None:
    """Rewrites the ONNX file of a converted model with its layers' integers, in standard operators only.

    Inputs with per-tensor grids are quantized and dequantized around the product, which runtimes fuse; inputs with
    per-token grids use byte products. Weights of weight-only schemes are dequantized. Embedding tables are looked up as
    bytes, and only the rows looked up are multiplied by their scales.

    Args:
        source: A float32 file.
        target: Where to write.
        layers: Layers of the model that the file was made from.

    Raises:
        ExportError: Concatenated layers are quantized in different ways, or the graph lacks some of the layers.
    """
    import onnx

    model = read_model(source)
    rewrite_products(model, layers, write_product)
    write_model(model, target)
    onnx.checker.check_model(str(target))


def quantize_fused_graph(source: Path, target: Path, layers: Mapping[str, Layer]) -> None:
    """Rewrites the fused file of a converted model for ONNX Runtime with integers.

    Attention and products take bytes and return floats, one operator each. The metadata of products omits Attention,
    whose products are internal.

    Args:
        source: A file written by `fuse_operators`.
        target: Where to write; runs on ONNX Runtime alone.
        layers: Layers of the model that the file was made from, all with per-tensor grids.

    Raises:
        ExportError: As in `quantize_graph`, or an Attention has a scale or a past, which QAttention doesn't support.
    """
    import onnx

    model = onnx.load(str(source))
    rewrite_products(model, layers, multiply_fused)
    write_model(model, target)


def rewrite_products(model: Any, layers: Mapping[str, Layer], write: _WriteProduct) -> None:
    """Rewrites every product and lookup of the graph that has a layer's weights with its integers, in place."""
    from onnx import helper, numpy_helper

    graph = model.graph
    constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    linear = RowIndex({name: layer for name, layer in layers.items() if layer.input_scales != "table"})
    tables = {layer.weight.tobytes(): (name, layer) for name, layer in layers.items() if layer.input_scales == "table"}
    writer, seen = Writer(), set[str]()
    products: dict[str, tuple[str, str]] = {}
    for node in graph.node:
        weight = find_weight(node, constants)
        if node.op_type == "Gather" and weight is not None and weight.tobytes() in tables:
            name, table = tables[weight.tobytes()]
            look_up(writer, node, name, table.integers, table.scales)
            seen.add(name)
            continue
        match = linear.find(weight) if weight is not None and node.op_type != "Gather" else None
        if match is None:
            writer.nodes.append(node)
            continue
        layer, names = match
        ends = write(writer, node, layer, "+".join(names))
        products |= {"+".join(names): ends} if ends is not None else {}
        seen |= set(names)
    left = sorted(set(linear.layers) - seen)
    if left:
        raise ExportError(
            f"onnx: the graph has no product with the weights of {', '.join(left[:3])}{', …' if len(left) > 3 else ''} "
            f"({len(left)} of {len(linear.layers)} layers that round): they would be deployed in float"
        )
    replace_nodes(graph, writer.nodes)
    graph.initializer.extend(writer.constants.values())
    remove_unused(graph)
    if MICROSOFT not in {each.domain for each in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    model.metadata_props.add(key=PRODUCTS, value=json.dumps(products))


def read_model(source: Path) -> Any:
    """Returns the model of a file in the opset of quantized ones.

    The converter can't take more than 2 GiB: weights beside the file are read after it.
    """
    import onnx

    without_weights = onnx.load(str(source), load_external_data=False)
    model = onnx.version_converter.convert_version(without_weights, _OPSET)
    onnx.load_external_data_for_model(model, str(source.parent))
    return model


def write_model(model: Any, target: Path) -> None:
    """Writes the model to a file; weights too large for one file are stored beside it."""
    import onnx

    target.parent.mkdir(parents=True, exist_ok=True)
    apart = model.ByteSize() > float_graph.LARGEST
    onnx.save(model, str(target), save_as_external_data=apart, location=f"{target.name}.data" if apart else None)


def find_weight(node: Any, constants: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns the constant of a product as [outputs, inputs], or that of a lookup unchanged."""
    if node.op_type == "Gather":
        return constants.get(node.input[0])
    if node.op_type not in ("MatMul", "Gemm", "Attention") or node.input[1] not in constants:
        return None
    value = constants[node.input[1]]
    if value.ndim != 2 or value.dtype != np.float32:
        return None
    turned = read_attribute(node, "transB")
    return value if turned is not None and turned.i else value.T


def look_up(writer: Writer, node: Any, name: str, integers: np.ndarray, scales: np.ndarray) -> None:
    """Writes a lookup of byte rows [rows, columns], each multiplied by its scale [rows, 1]."""
    # Not `out_scale`: a product that reads the rows names the scale of its bytes so.
    ids, out = node.input[1], node.output[0]
    rows = writer.add_node("Gather", [writer.add_constant(f"{name}.int8", integers), ids], f"{out}_rows_int8", axis=0)
    factors = writer.add_node(
        "Gather", [writer.add_constant(f"{name}.scales", scales), ids], f"{out}_rows_scale", axis=0
    )
    writer.add_node("Mul", [writer.add_node("Cast", [rows], f"{out}_rows_float", to=1), factors], out)


def write_product(writer: Writer, node: Any, layer: Layer, name: str) -> tuple[str, str]:
    """Writes the product that replaces a MatMul or Gemm, and returns (its input, its output before a bias)."""
    x, product = node.input[0], before_bias(node)
    if layer.input_scales == "token":
        by_token(writer, x, layer, name, product)
    elif layer.input_scales == "group":
        by_group(writer, x, layer, name, product)
    else:
        quantized = by_tensor(writer, x, layer) if layer.grid is not None else x
        writer.add_node("MatMul", [quantized, write_dequantized_weight(writer, layer, name)], product)
    add_bias(writer, node, product)
    return x, product


def before_bias(node: Any) -> str:
    """Returns the output name of a MatMul, or of a Gemm before its bias is added."""
    return f"{node.output[0]}_product" if len(node.input) > 2 else node.output[0]


def add_bias(writer: Writer, node: Any, product: str) -> None:
    """Adds the bias that follows a node to the product, under the name of the sum."""
    if len(node.input) > 2:
        writer.add_node("Add", [product, node.input[2]], node.output[0])


def multiply_fused(writer: Writer, node: Any, layer: Layer, name: str) -> tuple[str, str] | None:
    """Writes the product as one operator from bytes to floats.

    Returns (its input, its output), or None for Attention.
    """
    from onnx import helper

    x = node.input[0]
    quantized, scale, zero = write_quantized_input(writer, x, layer)
    weight = add_integers(writer, layer.integers.T, layer.bits, name)
    scales, none = writer.add_constant(f"{name}.scales", layer.scales[:, 0]), writer.add_scalar(0, np.int8)
    if node.op_type != "Attention":
        product = before_bias(node)
        writer.add_node("MatMulIntegerToFloat", [quantized, weight, scale, scales, zero, none], product, MICROSOFT)
        add_bias(writer, node, product)
        return x, product
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if "scale" in attributes or set(node.input[4:]) - {""}:
        raise ExportError(f"onnxruntime: the Attention of {name} has a scale or past input, which QAttention lacks")
    inputs = [quantized, weight, node.input[2], scale, scales, node.input[3], zero, none]
    writer.add_node("QAttention", inputs, node.output[0], MICROSOFT, **attributes)
    return None


def write_quantized_input(writer: Writer, x: str, layer: Layer) -> tuple[str, str, str]:
    """Writes the quantization of the input, and returns the names of the bytes, their scale and zero point."""
    assert layer.grid is not None
    scale, zero = writer.add_scalar(layer.grid[0]), writer.add_scalar(layer.grid[1], np.uint8)
    return writer.add_node_once("QuantizeLinear", [x, scale, zero], f"{x}_uint8_{len(writer.shared)}"), scale, zero


def by_tensor(writer: Writer, x: str, layer: Layer) -> str:
    """Adds the quantization of `x` with one scale for the whole tensor, and returns the result's name."""
    quantized = write_quantized_input(writer, x, layer)
    return writer.add_node_once("DequantizeLinear", quantized, f"{quantized[0]}_float")


def write_dequantized_weight(writer: Writer, layer: Layer, name: str) -> str:
    """Writes the weight [inputs, outputs], dequantized from its integers."""
    whole = add_integers(writer, layer.integers.T, layer.bits, name)
    groups = layer.scales.shape[1]
    if groups == 1:
        scales = writer.add_constant(f"{name}.scales", layer.scales[:, 0])
        return writer.add_node("DequantizeLinear", [whole, scales], f"{name}.weight_float", axis=1)
    size = layer.weight.shape[1] // groups
    scales = writer.add_constant(f"{name}.scales", layer.scales.T)
    return writer.add_node("DequantizeLinear", [whole, scales], f"{name}.weight_float", axis=0, block_size=size)


def add_integers(writer: Writer, value: np.ndarray, bits: int, name: str) -> str:
    """Adds a constant of integers with `bits` bits and returns its name."""
    return writer.add_int4_constant(f"{name}.int4", value) if bits == 4 else writer.add_constant(f"{name}.int8", value)


def by_token(writer: Writer, x: str, layer: Layer, name: str, out: str) -> None:
    """Writes products of tokens quantized to bytes, each on its own grid: one product per group of inputs.

    A byte product doesn't support a zero point per row, so its contribution is subtracted afterwards, in integers.
    """
    from onnx import TensorProto

    quantized, scale, zero = token_bytes(writer, x)
    groups, whole = layer.scales.shape[1], layer.integers.T
    size, parts = len(whole) // groups, []
    for group in range(groups):
        rows = slice(group * size, (group + 1) * size)
        group_input = quantized if groups == 1 else write_slice(writer, quantized, rows)
        weight = add_integers(writer, whole[rows], layer.bits, f"{name}.{group}")
        if layer.bits == 4:  # cast once, when the file is loaded
            weight = writer.add_node("Cast", [weight], f"{weight}_wide", to=int(TensorProto.INT8))
        product = writer.add_node("MatMulInteger", [group_input, weight], f"{out}_int32_{group}")
        sums = writer.add_constant(f"{name}.sums.{group}", whole[rows].sum(axis=0, dtype=np.int32))
        added = writer.add_node("Mul", [zero, sums], f"{out}_zero_{group}")
        product = writer.add_node("Sub", [product, added], f"{out}_whole_{group}")
        product = writer.add_node("Cast", [product], f"{out}_float_{group}", to=1)
        scales = writer.add_constant(f"{name}.scales.{group}", layer.scales[:, group])
        parts.append(writer.add_node("Mul", [product, scales], f"{out}_part_{group}"))
    total = parts[0] if groups == 1 else writer.add_node("Sum", parts, f"{out}_total")
    writer.add_node("Mul", [total, scale], out)


def by_group(writer: Writer, x: str, layer: Layer, name: str, out: str) -> None:
    """Writes ONNX Runtime's product of weights in groups with inputs that it rounds to bytes, group by group."""
    outputs, inputs = layer.integers.shape
    group, zero = find_input_group(inputs), 1 << (layer.bits - 1)
    levels = (layer.integers.astype(np.int16) + zero).astype(np.uint8).reshape(outputs, inputs // group, group)
    packed = levels if layer.bits == 8 else levels[..., ::2] | levels[..., 1::2] << 4
    scales = np.repeat(layer.scales, inputs // group // layer.scales.shape[1], axis=1)
    constants = [writer.add_constant(f"{name}.groups", packed), writer.add_constant(f"{name}.scales", scales)]
    sizes = {"K": inputs, "N": outputs, "bits": layer.bits, "block_size": group, "accuracy_level": ROUNDED_INPUTS}
    writer.add_node("MatMulNBits", [x, *constants], out, MICROSOFT, **sizes)


def token_bytes(writer: Writer, x: str) -> tuple[str, str, str]:
    """Writes per-token quantization, in the order of `fake_quantize_tokens`.

    Returns the names of the tokens as bytes, of their scales, and of their zero points (int32).
    """
    from onnx import TensorProto

    nothing, levels = writer.add_scalar(0.0), writer.add_scalar(LARGEST_LEVEL)
    low = writer.add_node_once(
        "Min", [writer.add_node_once("ReduceMin", [x, last_axis(writer)], f"{x}_least"), nothing], f"{x}_low"
    )
    high = writer.add_node_once(
        "Max", [writer.add_node_once("ReduceMax", [x, last_axis(writer)], f"{x}_most"), nothing], f"{x}_high"
    )
    share = writer.add_node_once("Div", [writer.add_node_once("Sub", [high, low], f"{x}_range"), levels], f"{x}_share")
    scale = writer.add_node_once("Max", [share, writer.add_scalar(SMALLEST_SCALE)], f"{x}_scale")
    below = writer.add_node_once("Div", [writer.add_node_once("Neg", [low], f"{x}_below"), scale], f"{x}_below_steps")
    zero = writer.add_node_once("Round", [below], f"{x}_zero")
    inverse = writer.add_node_once("Div", [writer.add_scalar(1.0), scale], f"{x}_inverse")
    steps = writer.add_node_once("Round", [writer.add_node_once("Mul", [x, inverse], f"{x}_steps")], f"{x}_rounded")
    moved = writer.add_node_once("Add", [steps, zero], f"{x}_moved")
    clipped = writer.add_node_once("Clip", [moved, nothing, levels], f"{x}_kept")
    quantized = writer.add_node_once("Cast", [clipped], f"{x}_uint8", to=int(TensorProto.UINT8))
    return quantized, scale, writer.add_node_once("Cast", [zero], f"{x}_zero_int32", to=int(TensorProto.INT32))


def last_axis(writer: Writer) -> str:
    """Adds the constant of the last axis and returns its name."""
    return writer.add_constant("last_axis", np.asarray([-1], np.int64))


def write_slice(writer: Writer, x: str, rows: slice) -> str:
    """Adds a slice of the rows of `x` and returns its name."""
    ends = [writer.add_constant(f"place_{bound}", np.asarray([bound], np.int64)) for bound in (rows.start, rows.stop)]
    return writer.add_node_once("Slice", [x, *ends, last_axis(writer)], f"{x}_{rows.start}")
