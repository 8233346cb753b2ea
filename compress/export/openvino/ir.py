"""OpenVINO on the CPU: writing and running the intermediate representation; float parts are computed in float32."""

import json
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.errors import ExportError
from compress.export.common.targets import check_installed

if TYPE_CHECKING:
    import numpy as np

OPENVINO_FILE = "model.xml"
IDS, MASK = "input_ids", "attention_mask"
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128)  # tokens to which a single text is padded


def import_openvino() -> ModuleType:
    """Returns the imported openvino module.

    Raises:
        CompressError: OpenVINO isn't installed.
    """
    check_installed(["openvino"])
    import openvino

    module: ModuleType = openvino
    return module


def export_openvino(source: Path, target: Path) -> None:
    """Converts an ONNX file without changing its numbers.

    Args:
        source: File written by `export_onnx` or `quantize_graph`.
        target: The .xml file to write; its weights are stored beside it as .bin.

    Raises:
        CompressError: OpenVINO isn't installed.
        ExportError: OpenVINO can't convert the graph.
    """
    openvino = import_openvino()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        model = openvino.convert_model(str(source))
        # By default OpenVINO would round the inputs of products with weight-only quantization.
        model.set_rt_info("0", ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
        openvino.save_model(model, str(target), compress_to_fp16=False)
    except RuntimeError as error:
        raise ExportError(f"openvino: {source} can't be converted: {error}") from error


class OpenVinoModel:
    """Exported model on OpenVINO's CPU plugin, one call at a time.

    A single text is padded to the next of `LENGTHS`, for each of which the model is compiled anew, with its own copy of
    the weights, when it first occurs. In a model of any length OpenVINO derives the shapes of all operators again
    whenever a text has another length than the one before: for a small model in 8 bits that takes as long as its
    products. Batches, and texts that are longer, have the model of any length.
    """

    alternates = True  # single texts and batches run in different models, so that both have to be verified

    def __init__(self, folder: Path, threads: int):
        openvino = import_openvino()
        # Explicit float32: OpenVINO would use bfloat16 on processors that support it.
        self.settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        self.core = openvino.Core()
        self.source = self.core.read_model(str(folder / OPENVINO_FILE))
        self.names = [value.any_name for value in self.source.inputs]
        self.folder = folder
        self.request = self._open(self.source)
        self.fixed: dict[int, Any] = {}  # length -> its request

    def __call__(self, inputs: "dict[str, np.ndarray]") -> "np.ndarray":
        """Returns logits of a padded batch of ids, mask and types, each [batch, length] int64.

        Their shape is [batch, classes], or [batch, length, classes] of tokens.
        """
        rows, length = inputs[self.names[0]].shape
        padded = find_length(length, self.padding.longest) if rows == 1 and MASK in self.names else None
        if padded is None:
            return self._run(self.request, inputs)
        padded_inputs = {name: self._pad(name, inputs[name], padded) for name in self.names}
        logits = self._run(self._open_fixed(padded), padded_inputs)
        return logits[:, :length] if logits.ndim == 3 else logits

    def values(self, inputs: "Mapping[str, np.ndarray]") -> "dict[str, np.ndarray]":
        """Returns every output by each of its names."""
        results = self.request.infer({name: inputs[name] for name in self.names})
        return {name: value.copy() for output, value in results.items() for name in output.names}

    @cached_property
    def padding(self) -> "Padding":
        """How texts are padded, by the config.json in the folder."""
        return Padding.read(self.folder)

    def _open_fixed(self, length: int) -> Any:
        if length not in self.fixed:
            model = self.source.clone()
            model.reshape(dict.fromkeys(self.names, [1, length]))
            self.fixed[length] = self._open(model)
        return self.fixed[length]

    def _open(self, model: Any) -> Any:
        return self.core.compile_model(model, "CPU", self.settings).create_infer_request()

    def _pad(self, name: str, values: "np.ndarray", length: int) -> "np.ndarray":
        import numpy as np

        padded = np.full((1, length), self.padding.pad_id if name == IDS else 0, np.int64)
        padded[:, : values.shape[1]] = values
        return padded

    def _run(self, request: Any, inputs: "Mapping[str, np.ndarray]") -> "np.ndarray":
        feeds = {name: inputs[name] for name in self.names}
        result: np.ndarray = next(iter(request.infer(feeds, share_inputs=True, share_outputs=True).values())).copy()
        return result


class Padding(NamedTuple):
    """The id of the padding token, and the most tokens to which a text is padded."""

    pad_id: int
    longest: int

    @staticmethod
    def read(folder: Path) -> "Padding":
        """Returns the padding by a folder's config.json."""
        from distill.checkpoint.positions import SHIFTED
        from distill.checkpoint.stock_type import stock_type

        config = json.loads((folder / "config.json").read_text())
        pad_id = config.get("pad_token_id") or 0
        positions = config.get("max_position_embeddings") or sys.maxsize
        is_shifted = stock_type(config["model_type"]) in SHIFTED
        return Padding(pad_id, positions - pad_id - 1 if is_shifted else positions)


def find_length(tokens: int, longest: int) -> int | None:
    """Returns the length to which a single text is padded; None if it is too long for any."""
    return next((each for each in LENGTHS if tokens <= each <= longest), None)
