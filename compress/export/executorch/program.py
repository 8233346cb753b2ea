"""ExecuTorch on the CPU through XNNPACK: writing and running a .pte file."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import ExportError
from compress.export.common.parity import Product
from compress.export.common.quiet import quiet
from compress.export.common.targets import check_installed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from compress.export.common.source import Source

_FILE = "model.pte"
MAX_BATCH = 32  # texts per call: ExecuTorch plans its memory for the largest batch
_INPUTS = "inputs.json"


def check_executorch() -> None:
    """Checks that ExecuTorch is installed.

    Raises:
        CompressError: ExecuTorch isn't installed.
    """
    check_installed(["executorch"])


def export_executorch(source: "Source", folder: Path, *, quantized: bool) -> None:
    """Writes `folder/model.pte` for batches of 1 to MAX_BATCH texts, each at most as long as the model allows.

    Args:
        source: The model.
        folder: Where to write.
        quantized: Whether to write integer weights instead of floats.

    Raises:
        CompressError: ExecuTorch isn't installed.
        ExportError: ExecuTorch can't express the model.
    """
    import json

    import torch

    from compress.export.onnx.graph import logits_only

    check_executorch()
    model = build_integer_model(source) if quantized else copy.deepcopy(source.model)
    # Of a fused attention XNNPACK takes only the products: the rest of it, which covers every pair of tokens, would run
    # in ExecuTorch's portable kernels and take half of the time of a text of 128 tokens.
    model.set_attn_implementation("eager")
    axes = {
        0: torch.export.Dim("batch", min=1, max=MAX_BATCH),
        1: torch.export.Dim("length", min=2, max=source.longest),
    }
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in source.inputs)
    program = lower_module(logits_only(model, source.inputs), example, {"tensors": tuple(axes for _ in example)})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILE).write_bytes(program)
    (folder / _INPUTS).write_text(json.dumps(source.inputs))


def lower_module(model: "nn.Module", example: "tuple[torch.Tensor, ...]", axes: Any = None) -> bytes:
    """Returns the ExecuTorch program of a module, with its products delegated to XNNPACK.

    `example` are tensors like its inputs; `axes` are their dynamic dimensions.
    """
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    try:
        with quiet(), torch.no_grad():
            graph = torch.export.export(model, example, dynamic_shapes=axes, strict=False)
            edge = to_edge_transform_and_lower(
                graph, partitioner=[XnnpackPartitioner()], compile_config=EdgeCompileConfig(_check_ir_validity=False)
            )
            return bytes(edge.to_executorch().buffer)
    except Exception as error:  # noqa: BLE001 - the export passes raise errors of any class
        raise ExportError(f"executorch: the model can't be exported: {error}") from error


def build_integer_model(source: "Source") -> Any:
    """Returns a copy of the model with integer weights, in the forms that XNNPACK and ExecuTorch's kernels support."""
    from torch import nn
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8TensorActivationQuantization as Inputs,
    )

    from compress.export.pytorch.torchao import unpacked_tensor
    from compress.quantize.prepare import replace_module

    assert source.quantization is not None
    model = copy.deepcopy(source.model)
    for name, quantized in source.quantization.items():
        layer: Any = model.get_submodule(name)
        weight = layer.weight.detach()
        if quantized.scheme is None:
            replace_module(model, name, byte_table(quantized.quantize(weight), quantized.scales))
        else:
            by_token = unpacked_tensor(weight, quantized, inputs=Inputs.INT8_ASYM_PER_TOKEN)
            layer.weight = nn.Parameter(by_token, requires_grad=False)
    return model


def byte_table(integers: "torch.Tensor", scales: "torch.Tensor") -> "nn.Module":
    """Returns an embedding that looks up rows of bytes and multiplies them by their scales."""
    import torch
    from torch import nn
    from torch.nn.functional import embedding

    class ByteTable(nn.Module):
        integers: torch.Tensor
        scales: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("integers", integers)
            self.register_buffer("scales", scales.clone())

        def forward(self, ids: "torch.Tensor") -> "torch.Tensor":
            return embedding(ids, self.integers).float() * embedding(ids, self.scales)

    return ByteTable()


def run_executorch_products(source: "Source", inputs: Mapping[str, np.ndarray]) -> dict[str, Product]:
    """Runs each linear layer on its input in the quantized reference, in a program of these products alone.

    They have the same weights as the deployed program's products. Lowering the whole model a second time to expose them
    would take a minute.
    """
    import torch
    from torch import nn

    read = layer_inputs(source, inputs)
    model = build_integer_model(source)

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(model.get_submodule(name) for name in read)

        def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
            return [layer(x) for layer, x in zip(self.layers, given, strict=True)]

    values = ExecuTorchProgram(lower_module(Products().eval(), tuple(read.values())))(list(read.values()))
    return {name: Product(x.numpy(), value, biased=True) for (name, x), value in zip(read.items(), values, strict=True)}


def layer_inputs(source: "Source", inputs: Mapping[str, np.ndarray]) -> "dict[str, torch.Tensor]":
    """Returns the input of each quantized linear layer in the reference."""
    import torch

    assert source.quantization is not None
    recorded: dict[str, torch.Tensor] = {}
    hooks = [
        source.reference.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: recorded.__setitem__(name, args[0].clone())
        )
        for name, quantized in source.quantization.items()
        if quantized.scheme is not None
    ]
    source.runner({name: inputs[name] for name in source.inputs})
    for hook in hooks:
        hook.remove()
    return {name: x.detach().clone() for name, x in recorded.items()}


class ExecuTorchProgram:
    """Forward method of a program. Its outputs live in the program's memory and are freed with it, so copy them."""

    def __init__(self, program: bytes | Path):
        check_executorch()
        from executorch.runtime import Runtime

        self.data = program
        self.program = Runtime.get().load_program(program)
        self.method = self.program.load_method("forward")

    def __call__(self, inputs: "Sequence[torch.Tensor]") -> list[np.ndarray]:
        """Returns the outputs of one call of the program."""
        return [value.numpy().copy() for value in self.method.execute(list(inputs))]


class ExecutorchModel:
    """Exported model in ExecuTorch, one call at a time. Its thread count applies to the whole process."""

    def __init__(self, folder: Path, threads: int):
        import json

        check_executorch()
        from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool

        _unsafe_reset_threadpool(threads)
        self.names = json.loads((folder / _INPUTS).read_text())
        self.program = ExecuTorchProgram(folder / _FILE)

    def __call__(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Returns logits [batch, classes] of a padded batch of ids, mask and types, each [batch, length] int64."""
        import torch

        columns = [torch.from_numpy(inputs[name]).split(MAX_BATCH) for name in self.names]
        return np.concatenate([self.program(list(rows))[0] for rows in zip(*columns, strict=True)])
