"""Settings of `python -m pipelines.export`."""

from dataclasses import dataclass

from compress.export.common.targets import check_installed, parse_formats
from compress.quantize.config import Processor
from distill.data.config import SHORTEST
from distill.errors import InputError
from pipelines.settings.commands.evaluate import check_processor_used
from pipelines.settings.places import check_local


@dataclass(frozen=True)
class ExportConfig:
    """Settings of `python -m pipelines.export`.

    Args:
        model: Checkpoint for any supported task: a local folder or a hub id. If the folder contains
            quantization.safetensors, the exported files compute with the low-bit integers that the model was trained
            with.
        data: File or folder with texts like those that the model will process, for the comparison.
        output: Folder that the files are written to.
        text: Column with the text; found by its name if omitted.
        parity: Number of texts on which an exported float model is compared with the original; a quantized model is
            compared on all texts.
        max_length: Maximum text length in tokens. 0: 256, or the number of positions of the model if that is smaller.
        export: Formats to write in addition to the checkpoint, separated by commas: onnx (standard operators, for any
            runtime), onnxruntime (operators fused for its CPU kernels), openvino, executorch, litert, numpy
            (students without attention), model2vec, static-embedding (static students, without their head), torchao or
            compressed-tensors (quantized checkpoints).
        dynamic: Also export with ONNX Runtime's dynamic int8 quantization; for float models only.
        processor: Processor that the dynamic int8 model will run on: here (this machine), avx2 or avx512 (x86 without
            VNNI), vnni or arm. Weights have 7 bits on x86 without VNNI, otherwise 8.
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
        check_local("output", self.output)
        if self.parity < 1:
            raise InputError(f"--parity: expected at least 1 text, found {self.parity}: no file could be verified")
        if self.max_length and self.max_length < SHORTEST:
            raise InputError(f"--max_length: expected 0 or at least {SHORTEST} tokens, found {self.max_length}")
        check_processor_used(self.processor, dynamic=self.dynamic)
        check_installed(parse_formats(self.export))
