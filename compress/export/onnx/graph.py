"""Export to ONNX with dynamic batch and length, and reloading with onnxruntime, which needs no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import ExportError
from compress.export.common.quiet import quiet

if TYPE_CHECKING:
    import onnxruntime
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ONNX_FILE = "model.onnx"
OPSET = 18
LARGEST = 2_000_000_000  # bytes of weights stored in the file itself, whose limit is 2 GiB including the graph


def export_onnx(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path, inputs: Sequence[str]
) -> None:
    """Writes `folder/model.onnx` in fp32, and the tokenizer and config beside it.

    Args:
        model: A model whose output has `logits`, or start and end logits.
        tokenizer: Its tokenizer.
        folder: Where to write; created when missing.
        inputs: Names of the model's inputs, each [batch, length] int64, such as input_ids and attention_mask.

    Raises:
        ExportError: PyTorch can't express the model in ONNX.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in inputs)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    shapes = {"tensors": tuple(axes for _ in inputs)}
    write_graph(logits_only(model, inputs), example, shapes, inputs, ["logits"], folder / ONNX_FILE)
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)


def write_graph(
    module: "nn.Module",
    example: tuple[Any, ...],
    shapes: Any,
    inputs: Sequence[str],
    outputs: Sequence[str],
    file: Path,
) -> None:
    """Writes a module as an ONNX file; weights too large for one file are stored beside it.

    Args:
        module: Takes the tensors of `example`, in their order, and returns its outputs.
        example: Example inputs.
        shapes: Their dynamic dimensions, as passed to `torch.export`.
        inputs, outputs: Names.
        file: Where to write.

    Raises:
        ExportError: PyTorch can't express the module in ONNX.
    """
    import torch

    apart = sum(each.nbytes for each in module.parameters()) > LARGEST
    # During an export torch replaces the kernel of recurrent layers and leaves the cache of kernels as it is: after an
    # earlier export in this process the length of the example would be fixed.
    torch.ops.aten.gru.input._dispatch_cache.clear()
    try:
        with quiet():
            torch.onnx.export(
                module.eval(),
                example,
                str(file),
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=shapes,
                dynamo=True,
                opset_version=OPSET,
                external_data=apart,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        model = type(getattr(module, "model", module)).__name__
        raise ExportError(f"onnx: {model} can't be exported: {error}") from error


def logits_only(model: "PreTrainedModel", inputs: Sequence[str]) -> "nn.Module":
    """Returns a module that maps the named inputs, in that order, to the model's logits alone."""
    from torch import nn

    from distill.checkpoint.outputs import read_logits

    class LogitsOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.eval()

        def forward(self, *tensors: "torch.Tensor") -> "torch.Tensor":
            return read_logits(self.model(**dict(zip(inputs, tensors, strict=True))))

    return LogitsOnly()


def open_session(model: str | bytes, threads: int) -> "onnxruntime.InferenceSession":
    """Returns a CPU session for a file, or the bytes of one, with all graph optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    # By default ONNX Runtime would round the inputs of products with weight-only quantization.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class OnnxModel:
    """Exported model in ONNX Runtime."""

    def __init__(self, folder: Path, threads: int):
        self.session = open_session(str(folder / ONNX_FILE), threads)
        self.names = [value.name for value in self.session.get_inputs()]

    def __call__(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the logits of a padded batch of ids, mask and types, each int64.

        Their shape is [batch, classes], [batch, length, classes], or for spans [batch, length, 2].
        """
        result: np.ndarray = self.session.run(["logits"], {name: inputs[name] for name in self.names})[0]
        return result
