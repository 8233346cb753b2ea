"""Object model of a .tflite file: reading, adding and writing its constants, tensors and operators."""

from collections.abc import Mapping
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

KIND = schema.BuiltinOperator
TYPE = schema.TensorType
ALIGNED = 16  # bytes


class Aligned(flatbuffers.Builder):
    """FlatBuffers builder that aligns byte vectors as the schema requires, which Python's own builder omits."""

    def StartVector(self, elemSize: int, numElems: int, alignment: int) -> Any:  # noqa: N802, N803
        """Starts a vector at an address that XNNPACK can map."""
        return super().StartVector(elemSize, numElems, ALIGNED if elemSize == 1 else alignment)


class File:
    """A .tflite file that is changed in place."""

    def __init__(self, program: bytes):
        self.model: Any = schema.ModelT.InitFromPackedBuf(program, 0)

    def packed(self) -> bytes:
        """Returns the bytes of the file."""
        builder = Aligned(1 << 20)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def kind(self, operator: Any) -> int:
        """Returns the code of an operator."""
        return int(self.model.operatorCodes[operator.opcodeIndex].builtinCode)

    def constant(self, graph: Any, index: int) -> np.ndarray | None:
        """Returns the values of a float constant; None if the tensor isn't constant or not float32."""
        tensor = graph.tensors[index]
        data = self.model.buffers[tensor.buffer].data
        if data is None or not len(data) or tensor.type != TYPE.FLOAT32:
            return None
        return np.asarray(data).view(np.float32).reshape(tuple(tensor.shape))

    def code(self, kind: int, version: int) -> int:
        """Returns the index of an operator code, added if missing."""
        codes = self.model.operatorCodes
        for index, each in enumerate(codes):
            if (each.builtinCode, each.version) == (kind, version):
                return index
        operator_code = schema.OperatorCodeT()
        operator_code.builtinCode = operator_code.deprecatedBuiltinCode = kind
        operator_code.version = version
        codes.append(operator_code)
        return len(codes) - 1

    def operator(self, kind: int, version: int, inputs: list[int], output: int, options: Any = None) -> Any:
        """Returns a new operator with these input and output tensors."""
        operator = schema.OperatorT()
        operator.opcodeIndex, operator.inputs, operator.outputs = self.code(kind, version), inputs, [output]
        if options is not None:
            operator.builtinOptions = options
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        return operator

    def buffer(self, values: np.ndarray) -> int:
        """Adds a buffer and returns its index."""
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(values.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def tensor(self, graph: Any, shape: Any, kind: int, buffer: int = 0, quantization: Any = None) -> int:
        """Adds a tensor and returns its index; without a buffer it isn't constant."""
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type, tensor.buffer = b"", [int(size) for size in shape], kind, buffer
        tensor.quantization, tensor.hasRank = quantization, True
        graph.tensors.append(tensor)
        return len(graph.tensors) - 1

    def keep(self, constants: Mapping[str, np.ndarray]) -> None:
        """Turns the named inputs into constants."""
        buffers = {name: self.buffer(value) for name, value in constants.items()}
        for signature in self.model.signatureDefs:
            graph = self.model.subgraphs[signature.subgraphIndex]
            for each in signature.inputs:
                graph.tensors[each.tensorIndex].buffer = buffers.get(each.name.decode(), 0)
            signature.inputs = [each for each in signature.inputs if each.name.decode() not in buffers]
            graph.inputs = [each.tensorIndex for each in signature.inputs]

    def join_biases(self, graph: Any) -> None:
        """Merges biases that are added to products into those products."""
        readers: dict[int, list[Any]] = {}
        for operator in graph.operators:
            operator.inputs = [int(index) for index in operator.inputs]
            for index in operator.inputs:
                readers.setdefault(index, []).append(operator)
        removed = set()
        for product in graph.operators:
            after = readers.get(product.outputs[0], [])
            if self.kind(product) == KIND.FULLY_CONNECTED and self.join_bias(graph, product, after):
                removed.add(id(after[0]))
        graph.operators = [operator for operator in graph.operators if id(operator) not in removed]

    def join_bias(self, graph: Any, product: Any, readers: list[Any]) -> bool:
        """Merges the bias if the only reader of a product adds one, and returns whether it did."""
        if len(readers) != 1 or self.kind(readers[0]) != KIND.ADD or is_biased(product):
            return False
        (add,), (out,) = readers, product.outputs
        (bias,) = (index for index in add.inputs if index != out)
        shape, after = (list(graph.tensors[index].shape) for index in (out, add.outputs[0]))
        value = self.constant(graph, bias)
        if value is None or list(value.shape) != shape[-1:] or shape != after:
            return False
        if product.builtinOptions.fusedActivationFunction:
            return False
        product.inputs, product.outputs = [*product.inputs[:2], bias], add.outputs
        product.builtinOptions.fusedActivationFunction = add.builtinOptions.fusedActivationFunction
        return True

    def strip(self) -> None:
        """Empties buffers that are no longer used."""
        read = {each.buffer for each in self.model.metadata or ()}
        for graph in self.model.subgraphs:
            used = {*graph.outputs, *(tensor_index for operator in graph.operators for tensor_index in operator.inputs)}
            for tensor_index, tensor in enumerate(graph.tensors):
                detail = tensor.quantization.details if tensor.quantization is not None else None
                used |= {detail.scales} if detail is not None and tensor_index in used else set()
            for tensor_index, tensor in enumerate(graph.tensors):
                tensor.buffer = tensor.buffer if tensor_index in used else 0
                read.add(tensor.buffer)
        for index, buffer in enumerate(self.model.buffers):
            buffer.data = buffer.data if index in read else None


def is_biased(product: Any) -> bool:
    """Returns whether a fully connected operator has a bias."""
    return list(product.inputs[2:]) not in ([], [-1])
