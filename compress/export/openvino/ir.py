"""OpenVINO on the CPU: writing and running the intermediate representation; float parts are computed in float32."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from compress.errors import ArtefactError
from compress.export.common.targets import check_installed

if TYPE_CHECKING:
    import numpy as np

OPENVINO_FILE = "model.xml"


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
        source: File written by `export_onnx` or `round_graph`.
        target: The .xml file to write; its weights are stored beside it as .bin.

    Raises:
        CompressError: OpenVINO isn't installed.
        ArtefactError: OpenVINO can't convert the graph.
    """
    openvino = import_openvino()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        model = openvino.convert_model(str(source))
        # By default OpenVINO would round the inputs of products with weight-only quantization.
        model.set_rt_info("0", ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
        openvino.save_model(model, str(target), compress_to_fp16=False)
    except RuntimeError as error:
        raise ArtefactError(f"openvino: {source} can't be converted: {error}") from error


class OpenVinoModel:
    """Exported model on OpenVINO's CPU plugin, one call at a time."""

    def __init__(self, folder: Path, threads: int):
        openvino = import_openvino()
        # Explicit float32: OpenVINO would use bfloat16 on processors that support it.
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        self.model = openvino.Core().compile_model(str(folder / OPENVINO_FILE), "CPU", settings)
        self.names = [value.any_name for value in self.model.inputs]
        self.request = self.model.create_infer_request()

    def __call__(self, inputs: "dict[str, np.ndarray]") -> "np.ndarray":
        """Returns logits [batch, classes] of a padded batch of ids, mask and types, each [batch, length] int64."""
        found = self.request.infer({name: inputs[name] for name in self.names})
        result: np.ndarray = next(iter(found.values())).copy()
        return result

    def values(self, inputs: "Mapping[str, np.ndarray]") -> "dict[str, np.ndarray]":
        """Returns every output by each of its names."""
        found = self.request.infer({name: inputs[name] for name in self.names})
        return {name: value.copy() for output, value in found.items() for name in output.names}
