"""Rewriting of .tflite files whose weights are on a grid to integer products with the trained layers' exact numbers.

The converter only supports floats. The converted model, whose weights are multiples of their scales, is therefore
exported as it is; here each product is matched to its layer by its weights and given that layer's integers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from compress.errors import ExportError
from compress.export.common.rows import Layer, RowIndex
from compress.export.litert.tflite import KIND, TYPE, File, is_biased

SMALLEST = np.float16(2**-24)  # lower bound of a group's scale: XNNPACK rejects 0
_ACTIVATIONS = {
    schema.ActivationFunctionType.RELU: KIND.RELU,
    schema.ActivationFunctionType.RELU6: KIND.RELU6,
    schema.ActivationFunctionType.RELU_N1_TO_1: KIND.RELU_N1_TO_1,
}


class ProductOutputs(NamedTuple):
    """Names of the outputs that hold a product's input and output, and whether the output includes the bias."""

    input: str
    output: str
    biased: bool


def write_integers(program: bytes, layers: Mapping[str, Layer], constants: Mapping[str, np.ndarray]) -> bytes:
    """Returns the file with the layers' integers, and without the names of intermediate tensors.

    If the scheme rounds the inputs, products take the integers directly, and each row of inputs is quantized in the
    call. Weights of weight-only schemes are dequantized when the file is opened. Embedding tables are looked up as
    bytes, and only the rows looked up are multiplied by their scales.

    Args:
        program: A float32 file.
        layers: Layers of the model that the file was made from; if empty, the file stays in float.
        constants: Model parameters among the file's inputs, by name, which become constants.

    Raises:
        ExportError: Concatenated layers are quantized in different ways, or the file lacks some of the layers.
    """
    file = File(program)
    file.keep(constants)
    rewriter = Rewriter(file, layers)
    for graph in file.model.subgraphs:
        ends = {*graph.inputs, *graph.outputs}
        for index, tensor in enumerate(graph.tensors):
            tensor.name = tensor.name if index in ends else b""
        file.join_biases(graph)
        rewriter.rewrite(graph)
    left = sorted(set(rewriter.linear.layers) - rewriter.seen)
    if left:
        raise ExportError(
            f"litert: the file has no product with the weights of {', '.join(left[:3])}{', …' if left[3:] else ''} "
            f"({len(left)} of {len(rewriter.linear.layers)} layers that round): they would be deployed in float"
        )
    file.strip()
    return file.packed()


class Rewriter:
    """Rewrites products and lookups of a file's graphs, with constants shared between the graphs."""

    def __init__(self, file: File, layers: Mapping[str, Layer]):
        self.file = file
        self.linear = RowIndex({name: layer for name, layer in layers.items() if layer.input_scales != "table"})
        self.tables = RowIndex({name: layer for name, layer in layers.items() if layer.input_scales == "table"})
        self.matches: dict[tuple[int, bool], tuple[Layer, list[str]] | None] = {}  # (buffer, is a table)
        self.buffers: dict[tuple[int, str], int] = {}  # (float buffer, its replacement's content) -> buffer
        self.seen: set[str] = set()

    def rewrite(self, graph: Any) -> None:
        """Replaces the float operators of quantized layers in a graph, in place."""
        written = {KIND.FULLY_CONNECTED: self.product, KIND.EMBEDDING_LOOKUP: self.look_up, KIND.ADD: self.positions}
        operators: list[Any] = []
        for operator in graph.operators:
            write = written.get(self.file.kind(operator))
            operators += [operator] if write is None else write(graph, operator)
        graph.operators = operators

    def layer(self, graph: Any, index: int, rows: RowIndex) -> tuple[Layer, list[str]] | None:
        """Returns the layer whose rows a constant has; None if there is none, or the tensor isn't constant."""
        key = graph.tensors[index].buffer, rows is self.tables
        if key not in self.matches:
            value = self.file.constant(graph, index)
            self.matches[key] = (
                None if value is None or value.ndim < 2 else rows.find(value.reshape(-1, value.shape[-1]))
            )
        return self.matches[key]

    def product(self, graph: Any, operator: Any) -> list[Any]:
        """Returns the operators that replace a fully connected one."""
        index = operator.inputs[1]
        match = self.layer(graph, index, self.linear)
        if match is None:
            return [operator]
        layer, names = match
        self.seen |= set(names)
        before: list[Any] = []
        if layer.input_scales == "token":
            # Required by LiteRT's own kernels, whose zero point would be 0 otherwise; XNNPACK always does this.
            operator.builtinOptions.asymmetricQuantizeInputs = True
            operator.opcodeIndex = self.file.code(KIND.FULLY_CONNECTED, 12 if layer.bits == 8 else 13)
            weight = self.by_row(graph, index, layer) if layer.bits == 8 else self.by_group(graph, index, layer)
        else:
            dequantize, weight = self.unfolded(graph, index, layer)
            before.append(dequantize)
        graph.tensors[weight].name = "+".join(names).encode()
        operator.inputs[1] = weight
        return [*before, operator, *self.activation(graph, operator)]

    def look_up(self, graph: Any, operator: Any) -> list[Any]:
        """Returns lookups of byte rows and of their scales, and their product.

        Scales stored as the table's own quantization parameters would be duplicated in the file for every graph.
        """
        ids, index = operator.inputs
        match = self.layer(graph, index, self.tables)
        if match is None:
            return [operator]
        layer, names = match
        file, (after,) = self.file, operator.outputs
        buffer = self.shared(graph, index, "integers", pack_integers(layer))
        integers = file.tensor(graph, layer.weight.shape, TYPE.INT8, buffer, quantization_parameters(np.ones(1)))
        graph.tensors[integers].name = "+".join(names).encode()
        scales = file.tensor(graph, layer.scales.shape, TYPE.FLOAT32, self.shared(graph, index, "scales", layer.scales))
        rows, size = graph.tensors[after].shape
        read = [file.tensor(graph, [rows, width], TYPE.FLOAT32) for width in (size, 1)]
        return [
            file.operator(KIND.EMBEDDING_LOOKUP, 3, [ids, integers], read[0]),
            file.operator(KIND.EMBEDDING_LOOKUP, 1, [ids, scales], read[1]),
            file.operator(KIND.MUL, 1, read, after, schema.MulOptionsT()),
        ]

    def positions(self, graph: Any, operator: Any) -> list[Any]:
        """Dequantizes position tables that the converter turned into constants added to other lookups."""
        before: list[Any] = []
        for number, index in enumerate(operator.inputs):
            match = self.layer(graph, index, self.tables)
            if match is not None:
                dequantize, operator.inputs[number] = self.unfolded(graph, index, match[0])
                before.append(dequantize)
        return [*before, operator]

    def by_row(self, graph: Any, index: int, layer: Layer) -> int:
        """Returns an int8 tensor with per-row scales that replaces a float tensor."""
        integers = self.shared(graph, index, "integers", pack_integers(layer))
        return self.file.tensor(graph, layer.weight.shape, TYPE.INT8, integers, quantization_parameters(layer.scales))

    def by_group(self, graph: Any, index: int, layer: Layer) -> int:
        """Returns a 4-bit tensor with float16 scales per group of inputs.

        Converting bfloat16 scales to float16 changes none of them.
        """
        scales = np.maximum(layer.scales.astype(np.float16), SMALLEST)
        buffer = self.shared(graph, index, "scales", scales)
        detail = schema.BlockwiseQuantizationT()
        detail.scales = self.file.tensor(graph, scales.shape, TYPE.FLOAT16, buffer)
        detail.zeroPoints, detail.blockSize = -1, layer.weight.shape[1] // scales.shape[1]
        quantization = schema.QuantizationParametersT()
        quantization.details, quantization.detailsType = detail, schema.QuantizationDetails.BlockwiseQuantization
        integers = self.shared(graph, index, "integers", pack_integers(layer))
        return self.file.tensor(graph, layer.weight.shape, TYPE.INT4, integers, quantization)

    def unfolded(self, graph: Any, index: int, layer: Layer) -> tuple[Any, int]:
        """Returns an operator that dequantizes a constant, which runtimes run once, and its float tensor."""
        integers = self.by_row(graph, index, layer)
        floats = self.file.tensor(graph, layer.weight.shape, TYPE.FLOAT32)
        return self.file.operator(KIND.DEQUANTIZE, 5, [integers], floats, schema.DequantizeOptionsT()), floats

    def shared(self, graph: Any, index: int, part: str, values: np.ndarray) -> int:
        """Returns the index of the buffer that replaces a constant's in all graphs."""
        key = graph.tensors[index].buffer, part
        if key not in self.buffers:
            self.buffers[key] = self.file.buffer(values)
        return self.buffers[key]

    def activation(self, graph: Any, operator: Any) -> list[Any]:
        """Splits off an activation that the converter fused into a product, so that the product can be observed."""
        options, (after,) = operator.builtinOptions, operator.outputs
        if not options.fusedActivationFunction:
            return []
        kind = _ACTIVATIONS[options.fusedActivationFunction]
        options.fusedActivationFunction = schema.ActivationFunctionType.NONE
        product = self.file.tensor(graph, graph.tensors[after].shape, TYPE.FLOAT32)
        operator.outputs = [product]
        return [self.file.operator(kind, 1, [product], after)]


def quantization_parameters(scales: np.ndarray) -> Any:
    """Returns quantization parameters with one scale per tensor or per row."""
    parameters = schema.QuantizationParametersT()
    parameters.scale, parameters.zeroPoint = scales.reshape(-1).tolist(), [0] * scales.size
    parameters.quantizedDimension = 0
    return parameters


def pack_integers(layer: Layer) -> np.ndarray:
    """Returns the integers as bytes; 4-bit integers are packed two per byte, the first in the lower half."""
    if layer.bits != 4:
        return layer.integers
    flat = layer.integers.reshape(-1)
    halves = np.append(flat, np.zeros(flat.size % 2, flat.dtype)).astype(np.uint8) & 0xF
    return halves[0::2] | halves[1::2] << 4


def expose_litert_products(
    program: bytes, signature: str, layers: Mapping[str, Layer]
) -> tuple[bytes, dict[str, ProductOutputs]]:
    """Returns one signature of a file with its products' inputs and outputs as extra outputs.

    Their names are returned by layer.
    """
    file = File(program)
    definition = next(each for each in file.model.signatureDefs if each.signatureKey.decode() == signature)
    graph = file.model.subgraphs[definition.subgraphIndex]
    file.model.subgraphs, file.model.signatureDefs, definition.subgraphIndex = [graph], [definition], 0
    products = {}
    for operator in graph.operators:
        name = graph.tensors[operator.inputs[1]].name.decode() if file.kind(operator) == KIND.FULLY_CONNECTED else ""
        if name and set(name.split("+")) <= layers.keys():
            products[name] = ends = ProductOutputs(f"{name}:in", f"{name}:out", is_biased(operator))
            definition.outputs += [
                build_output(ends.input, operator.inputs[0]),
                build_output(ends.output, operator.outputs[0]),
            ]
    graph.outputs = list(dict.fromkeys(each.tensorIndex for each in definition.outputs))
    return file.packed(), products


def build_output(name: str, index: int) -> Any:
    """Returns the name and tensor index of an output as a signature stores them."""
    output = schema.TensorMapT()
    output.name, output.tensorIndex = name.encode(), int(index)
    return output
