"""Runtimes that `benchmarks.sparse_students` measures: each makes a callable of every student, or says why it can't."""

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.onnx.graph import FILE, OnnxModel, export_onnx
from compress.export.onnx.int8 import products_saturate, quantize_int8
from compress.measure.latency import Inputs, Runner
from compress.sparsity.layers import sparse_layers

DECOMPRESSION = 0.4  # a weight with more zeros than this is kept packed; 2:4 has 0.5
CALIBRATION = 64  # texts that NNCF sees


class Unavailable(Exception):  # noqa: N818
    """Why a runtime can't run a student here."""


@dataclass(frozen=True)
class Students:
    """The trained students and what an export needs.

    Args:
        models: Way -> student; `dense` is among them.
        tokenizer: Theirs.
        place: A folder for exported files.
        samples: Real batches, for calibration.
        threads: Threads a runtime gets.
    """

    models: Mapping[str, PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    place: Path
    samples: Sequence[Inputs]
    threads: int

    def folder(self, way: str, name: str = "onnx") -> Path:
        return self.place / way / name


def torch_dense(students: Students, way: str) -> Runner:
    """The stock class: zeros are multiplied like any other number."""
    return module_runner(students.models[way])


def torch_csr(students: Students, way: str) -> Runner:
    """Sparse layers as CSR matrices; the dense student stays dense, it is what they are compared with."""
    if way.startswith("dense"):
        return module_runner(students.models[way])
    return module_runner(replaced(students.models[way], lambda weight: weight.to_sparse_csr()))


def torch_semi_structured(students: Students, way: str) -> Runner:
    """PyTorch's own 2:4 tensors."""
    if way.startswith("dense"):
        return module_runner(students.models[way])
    if way != "2:4":
        raise Unavailable("needs 2:4")
    try:
        return module_runner(replaced(students.models[way], torch.sparse.to_sparse_semi_structured))
    except (RuntimeError, NotImplementedError) as error:
        raise Unavailable(f"not on CPU: {str(error).splitlines()[0]}") from error


class SparseLinear(nn.Module):
    """y = W x + b with W [output, input] in a sparse layout; x [..., input]."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        out = (self.weight @ x.reshape(-1, x.shape[-1]).T).T
        return (out if self.bias is None else out + self.bias).reshape(*x.shape[:-1], -1)


def replaced(model: PreTrainedModel, layout: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    other = copy.deepcopy(model)
    for name, layer in sparse_layers(other).items():
        parent, _, own = name.rpartition(".")
        bias = None if layer.bias is None else layer.bias.detach()
        setattr(other.get_submodule(parent), own, SparseLinear(layout(layer.weight.detach()), bias))
    return other


def module_runner(model: PreTrainedModel) -> Runner:
    @torch.inference_mode()
    def run(inputs: Inputs) -> np.ndarray:
        return model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits.numpy()

    return run


def onnx_float(students: Students, way: str) -> Runner:
    """ONNX Runtime, fp32, all graph optimisations."""
    return OnnxModel(exported(students, way), students.threads)


def onnx_int8(students: Students, way: str) -> Runner:
    """ONNX Runtime, dynamic int8, a scale an output."""
    folder = students.folder(way, "onnx-int8")
    quantize_int8(exported(students, way) / FILE, folder / FILE, reduced=products_saturate())
    return OnnxModel(folder, students.threads)


def exported(students: Students, way: str) -> Path:
    """The student as ONNX, written when first asked for."""
    folder, model = students.folder(way), students.models[way]
    if not (folder / FILE).exists():
        export_onnx(model, students.tokenizer, folder, list(students.samples[0]))
    return folder


def openvino_float(students: Students, way: str) -> Runner:
    """OpenVINO, fp32."""
    return OpenVino(students, read(students, way), {"INFERENCE_PRECISION_HINT": "f32"})


def openvino_int8(students: Students, way: str) -> Runner:
    """OpenVINO, int8 weights and activations by NNCF's post-training quantization."""
    return OpenVino(students, quantized(students, way), {})


def openvino_packed(students: Students, way: str) -> Runner:
    """The same with weights kept packed in memory where they have enough zeros; OpenVINO does so with AMX only."""
    packed = {} if way.startswith("dense") else {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": DECOMPRESSION}
    return OpenVino(students, quantized(students, way), packed)


def read(students: Students, way: str) -> Any:
    need("openvino")
    import openvino

    return openvino.Core().read_model(str(exported(students, way) / FILE))


def quantized(students: Students, way: str) -> Any:
    """The student in int8, made once."""
    need("openvino", "nncf")
    import nncf
    import openvino

    nncf.set_log_level(40)
    file = students.folder(way, "openvino-int8") / "model.xml"
    if not file.exists():
        rows = [dict(batch) for batch in students.samples[:CALIBRATION]]
        model = nncf.quantize(
            read(students, way), nncf.Dataset(rows), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows)
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        openvino.save_model(model, str(file), compress_to_fp16=False)
    return openvino.Core().read_model(str(file))


def need(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise Unavailable(f"{name} isn't installed")


class OpenVino:
    """A compiled model, called with arrays by name."""

    def __init__(self, students: Students, model: Any, properties: dict[str, Any]):
        import openvino

        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": students.threads} | properties
        compiled = openvino.Core().compile_model(model, "CPU", settings)
        self.request = compiled.create_infer_request()
        self.names = [each.get_any_name() for each in compiled.inputs]

    def __call__(self, inputs: Inputs) -> np.ndarray:
        return self.request.infer({name: inputs[name] for name in self.names})[0]


# Name -> maker, and whether its logits are the student's but for rounding of float32 sums.
RUNTIMES: dict[str, tuple[Callable[[Students, str], Runner], bool]] = {
    "PyTorch, dense kernels": (torch_dense, True),
    "PyTorch, CSR": (torch_csr, True),
    "PyTorch, semi-structured": (torch_semi_structured, True),
    "ONNX Runtime fp32": (onnx_float, True),
    "ONNX Runtime dynamic int8": (onnx_int8, False),
    "OpenVINO fp32": (openvino_float, True),
    "OpenVINO int8": (openvino_int8, False),
    "OpenVINO int8, packed zeros": (openvino_packed, False),
}
