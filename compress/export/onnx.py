"""ONNX with dynamic batch and length, the tokenizer beside it; reading it back needs onnxruntime and no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compress.errors import ArtefactError
from compress.export.quiet import quiet

if TYPE_CHECKING:
    import onnxruntime
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE = "model.onnx"
OPSET = 18


def export_onnx(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path, inputs: Sequence[str]
) -> None:
    """Writes `folder/model.onnx` in fp32, and the tokenizer and config beside it.

    Args:
        model: A model whose output has `logits`.
        tokenizer: Its tokenizer.
        folder: Where to write; created when missing.
        inputs: Names of the model's inputs, each [batch, length] int64, such as input_ids and attention_mask.

    Raises:
        ArtefactError: PyTorch can't express the model in ONNX.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in inputs)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    try:
        with quiet():
            torch.onnx.export(
                logits_only(model, inputs),
                example,
                str(folder / FILE),
                input_names=list(inputs),
                output_names=["logits"],
                dynamic_shapes={"tensors": tuple(axes for _ in inputs)},
                dynamo=True,
                opset_version=OPSET,
                external_data=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ArtefactError(f"onnx: {type(model).__name__} can't be exported: {error}") from error
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)


def logits_only(model: "PreTrainedModel", inputs: Sequence[str]):
    """The model as a module from the named inputs, in that order, to logits alone."""
    from torch import nn

    class LogitsOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.eval()

        def forward(self, *tensors):
            return self.model(**dict(zip(inputs, tensors, strict=True))).logits

    return LogitsOnly()


def open_session(model: str | bytes, threads: int) -> "onnxruntime.InferenceSession":
    """A file, or the bytes of one, in ONNX Runtime with all graph optimisations, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    # By default it would round the inputs of products whose weights alone are rounded.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class OnnxModel:
    """An exported model in ONNX Runtime."""

    def __init__(self, folder: Path, threads: int):
        self.session = open_session(str(folder / FILE), threads)
        self.names = [value.name for value in self.session.get_inputs()]

    def __call__(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits [batch, classes] or [batch, length, classes] of a padded batch of ids, mask and types, each int64."""
        return self.session.run(["logits"], {name: inputs[name] for name in self.names})[0]
