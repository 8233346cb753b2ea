"""ExecuTorch on the CPU through XNNPACK: a .pte file, and what runs it."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import ArtefactError, CompressError
from compress.export.parity import Product

if TYPE_CHECKING:
    import torch
    from torch import nn

    from compress.export.source import Source

FILE = "model.pte"
MOST = 32  # texts a call: ExecuTorch plans its memory for the largest
INPUTS = "inputs.json"


def library() -> Any:
    """
    Raises:
        CompressError: ExecuTorch isn't installed.
    """
    try:
        import executorch
    except ImportError as error:
        raise CompressError(
            "executorch: expected the runtime to be installed, found none; pip install 'stillroom[executorch]'"
        ) from error
    return executorch


def export_executorch(source: "Source", folder: Path, *, rounded: bool) -> None:
    """Writes `folder/model.pte` for batches of 1 to MOST texts of up to as many tokens as the model has positions for.

    Args:
        source: The model.
        folder: Where to write.
        rounded: With its integers instead of floats.

    Raises:
        CompressError: ExecuTorch isn't installed.
        ArtefactError: It can't express the model.
    """
    import json

    from compress.export.onnx import logits_only

    library()
    model = with_integers(source) if rounded else source.model
    program = lowered(logits_only(model, source.inputs), source)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(program)
    (folder / INPUTS).write_text(json.dumps(source.inputs))


def lowered(model: "nn.Module", source: "Source") -> bytes:
    """The program of a module from the source's inputs, its products left to XNNPACK."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    axes = {0: torch.export.Dim("batch", min=1, max=MOST), 1: torch.export.Dim("length", min=2, max=longest(source))}
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in source.inputs)
    try:
        with quiet(), torch.no_grad():
            graph = torch.export.export(
                model, example, dynamic_shapes={"tensors": tuple(axes for _ in example)}, strict=False
            )
            edge = to_edge_transform_and_lower(
                graph, partitioner=[XnnpackPartitioner()], compile_config=EdgeCompileConfig(_check_ir_validity=False)
            )
            return bytes(edge.to_executorch().buffer)
    except Exception as error:  # noqa: BLE001 - its passes raise errors of any class
        raise ArtefactError(f"executorch: {type(source.model).__name__} can't be exported: {error}") from error


def longest(source: "Source") -> int:
    """Tokens that fit into the model's positions and the tokenizer's own limit."""
    config = source.model.config
    most = int(getattr(config, "max_position_embeddings", 512))
    first = (config.pad_token_id or 0) + 1 if config.model_type in ("roberta", "xlm-roberta") else 0
    return min(most - first, source.tokenizer.model_max_length)


def with_integers(source: "Source") -> Any:
    """A copy of the model whose weights are integers, in the forms that XNNPACK and ExecuTorch's kernels know."""
    from torch import nn
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8TensorActivationQuantization as Inputs,
    )

    from compress.export.torchao import unpacked_tensor
    from compress.quantize.prepare import replace

    assert source.rounding is not None
    model = copy.deepcopy(source.model)
    for name, rounded in source.rounding.items():
        layer: Any = model.get_submodule(name)
        weight = layer.weight.detach()
        if rounded.scheme is None:
            replace(model, name, byte_table(rounded.integers(weight), rounded.scales))
        else:
            by_token = unpacked_tensor(weight, rounded, inputs=Inputs.INT8_ASYM_PER_TOKEN)
            layer.weight = nn.Parameter(by_token, requires_grad=False)
    return model


def byte_table(integers: "torch.Tensor", scales: "torch.Tensor") -> "nn.Module":
    """An embedding that reads rows of bytes and multiplies them by their scales."""
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


def probe(source: "Source", inputs: Mapping[str, np.ndarray]) -> dict[str, Product]:
    """What each linear layer reads and gives, in a program that gives all of that out."""
    import torch
    from torch import nn

    assert source.rounding is not None
    model = with_integers(source)
    names = [name for name, rounded in source.rounding.items() if rounded.scheme is not None]
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, given, out, name=name: seen.__setitem__(name, (given[0], out))
        )

    class Opened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
            self.model(**dict(zip(source.inputs, tensors, strict=True)))
            return [value for name in names for value in seen[name]]

    values = opened(lowered(Opened(), source)).execute([torch.from_numpy(inputs[name]) for name in source.inputs])
    pairs = zip(values[0::2], values[1::2], strict=True)
    return {
        name: Product(read.numpy().copy(), gave.numpy().copy(), biased=True)
        for name, (read, gave) in zip(names, pairs, strict=True)
    }


def opened(program: bytes | Path) -> Any:
    """The forward method of a program."""
    library()
    from executorch.runtime import Runtime

    return Runtime.get().load_program(program).load_method("forward")


@contextlib.contextmanager
def quiet():
    """Keeps the lowering's chatter off the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class ExecutorchModel:
    """An exported model in ExecuTorch, one call at a time. Its threads are the whole process's."""

    def __init__(self, folder: Path, threads: int):
        import json

        library()
        from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool

        _unsafe_reset_threadpool(threads)
        self.names = json.loads((folder / INPUTS).read_text())
        self.method = opened(folder / FILE)

    def __call__(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits [batch, classes] of a padded batch of ids, mask and types, each [batch, length] int64."""
        import torch

        given = [torch.from_numpy(inputs[name]) for name in self.names]
        return self.method.execute(given)[0].numpy().copy()
