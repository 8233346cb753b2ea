"""Settings of `python -m pipelines.export`."""

from dataclasses import dataclass

from compress.export.common.targets import check_installed, formats_of
from compress.quantize.config import Processor
from distill.errors import InputError


@dataclass(frozen=True)
class ExportConfig:
    """Settings of `python -m pipelines.export`.

    Args:
        model: A checkpoint of any task: a local folder or a hub id; with quantization.safetensors beside it its files
            compute in few bits, as it was trained to.
        data: File or folder with texts like those the model will see, for the comparison.
        output: Folder to write to.
        text: Column with the text; found by name when left out.
        parity: Texts on which an artefact in float is compared with the model; one in few bits is on all of them.
        max_length: Longest text in tokens; 0: 256, or as many as the model has positions for where these are fewer.
        export: Formats to write beside the checkpoint: onnx (standard operators, for any runtime), onnxruntime
            (operators joined for its CPU kernels), openvino, executorch, litert, torchao or compressed-tensors
            (quantized checkpoints).
        dynamic: Also ONNX Runtime's own dynamic int8, of a model in float.
        processor: Where that will run: weights have 7 bits for avx2 and avx512, x86 without VNNI, and for here where
            this machine is one.
    """

    model: str = ""
    data: str = ""
    output: str = ""
    text: str | None = None
    parity: int = 256
    max_length: int = 0
    export: str = "onnx,onnxruntime"
    dynamic: bool = False
    processor: Processor = "here"

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            if not getattr(self, name):
                raise InputError(f"--{name}: missing; see --help for examples")
        check_installed(formats_of(self.export))
