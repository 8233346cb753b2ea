"""Opens what an export wrote in the runtime it was written for; each is called with arrays and gives logits."""

from pathlib import Path
from typing import Any

# Name of an export -> where it runs, and in what precision.
RUNTIMES = {
    "huggingface": ("pytorch", "fp32"),
    "onnx": ("onnxruntime", "fp32"),
    "onnxruntime": ("onnxruntime", "fp32"),
    "onnx-int8": ("onnxruntime", "int8"),
    "onnxruntime-int8": ("onnxruntime", "int8"),
    "openvino": ("openvino", "fp32"),
}


def open_export(target: str, folder: Path, threads: int) -> Any:
    """The artefact of kind `target` in `folder`, on `threads` threads (PyTorch's are set by its caller).

    The result maps a padded batch of ids, mask and types, each [batch, length] int64, to logits [batch, classes], and
    has the `names` of the inputs that it reads.

    Raises:
        CompressError: The runtime isn't installed.
    """
    runtime, _ = RUNTIMES[target]
    if runtime == "onnxruntime":
        from compress.export.onnx import OnnxModel

        return OnnxModel(folder, threads)
    if runtime == "openvino":
        from compress.export.openvino import OpenVinoModel

        return OpenVinoModel(folder, threads)
    from compress.export.huggingface import TorchModel

    return TorchModel(folder)
