"""The runtimes of `benchmarks.pruning.sparse_students`: each opens a student for inference, or says why it can't."""

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.onnx.graph import ONNX_FILE, OnnxModel, export_onnx
from compress.export.onnx.int8 import products_saturate, quantize_int8
from compress.measure.latency import TimedInputs
from compress.sparsity.layers import find_sparsifiable_layers

if TYPE_CHECKING:
    from openvino import Model as OpenVinoModel

DECOMPRESSION_RATE = 0.4  # weights with a larger share of zeros are kept packed; 2:4 has 0.5
CALIBRATION_TEXTS = 64  # of NNCF
LogitsRunner: TypeAlias = Callable[[TimedInputs], np.ndarray]


class UnavailableError(Exception):
    """The reason why a runtime can't run a student here."""


@dataclass(frozen=True)
class StudentFiles:
    """The trained students, and what an export needs.

    Args:
        models: Name -> student; `dense` is among them.
        tokenizer: The students' tokenizer.
        root: Folder for exported files.
        samples: Real batches, for calibration.
        threads: Threads of each runtime.
    """

    models: Mapping[str, PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    root: Path
    samples: Sequence[TimedInputs]
    threads: int

    def folder(self, name: str, target: str = "onnx") -> Path:
        """Returns the folder of a student's exported files."""
        return self.root / name / target


@torch.inference_mode()
def compute_logits(model: nn.Module, inputs: TimedInputs) -> np.ndarray:
    """Returns a PyTorch model's logits [rows, classes]."""
    logits: Tensor = model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits
    return logits.numpy()


def open_torch(students: StudentFiles, name: str) -> LogitsRunner:
    """Opens the stock class in PyTorch: zeros are multiplied like any other number."""
    return partial(compute_logits, students.models[name])


def open_torch_csr(students: StudentFiles, name: str) -> LogitsRunner:
    """Opens a student whose sparse layers are CSR matrices; the dense student stays dense, for comparison."""
    model = students.models[name]
    return partial(compute_logits, model if is_dense(name) else replace_layers(model, Tensor.to_sparse_csr))


def open_torch_semi_structured(students: StudentFiles, name: str) -> LogitsRunner:
    """Opens a student with PyTorch's own 2:4 tensors."""
    model = students.models[name]
    if is_dense(name):
        return partial(compute_logits, model)
    if name != "2:4":
        raise UnavailableError("needs 2:4")
    try:
        return partial(compute_logits, replace_layers(model, torch.sparse.to_sparse_semi_structured))
    except (RuntimeError, NotImplementedError) as error:
        raise UnavailableError(f"not on CPU: {str(error).splitlines()[0]}") from error


def is_dense(name: str) -> bool:
    """Returns whether a student is the dense one or its copy."""
    return name.startswith("dense")


class SparseLinear(nn.Module):
    """A linear layer y = W x + b with W [output, input] in a sparse layout; x [..., input]."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns y [..., output]."""
        out = (self.weight @ x.reshape(-1, x.shape[-1]).T).T
        return (out if self.bias is None else out + self.bias).reshape(*x.shape[:-1], -1)


def replace_layers(model: PreTrainedModel, convert: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """Returns a copy of a model whose sparse layers have converted weights."""
    other = copy.deepcopy(model)
    for name, layer in find_sparsifiable_layers(other).items():
        parent, _, attribute = name.rpartition(".")
        bias = None if layer.bias is None else layer.bias.detach()
        setattr(other.get_submodule(parent), attribute, SparseLinear(convert(layer.weight.detach()), bias))
    return other


def open_onnx(students: StudentFiles, name: str) -> LogitsRunner:
    """Opens a student on ONNX Runtime in fp32 with all graph optimizations."""
    return OnnxModel(export_student(students, name), students.threads)


def open_onnx_int8(students: StudentFiles, name: str) -> LogitsRunner:
    """Opens a student on ONNX Runtime in dynamic int8 with a scale per output."""
    folder = students.folder(name, "onnx-int8")
    quantize_int8(export_student(students, name) / ONNX_FILE, folder / ONNX_FILE, reduce_range=products_saturate())
    return OnnxModel(folder, students.threads)


def export_student(students: StudentFiles, name: str) -> Path:
    """Returns the folder of the student as ONNX, which is exported on the first call."""
    folder, model = students.folder(name), students.models[name]
    if not (folder / ONNX_FILE).exists():
        export_onnx(model, students.tokenizer, folder, list(students.samples[0]))
    return folder


def open_openvino(students: StudentFiles, name: str) -> LogitsRunner:
    """Opens a student on OpenVINO in fp32."""
    return OpenVinoRunner(students, read_openvino(students, name), {"INFERENCE_PRECISION_HINT": "f32"})


def open_openvino_int8(students: StudentFiles, name: str) -> LogitsRunner:
    """Opens a student on OpenVINO with int8 weights and activations by NNCF's post-training quantization."""
    return OpenVinoRunner(students, quantize_openvino(students, name), {})


def open_openvino_packed(students: StudentFiles, name: str) -> LogitsRunner:
    """Opens a student on OpenVINO in int8, with weights that have enough zeros packed in memory.

    OpenVINO does so only on processors with AMX.
    """
    packed: dict[str, object] = {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": DECOMPRESSION_RATE}
    return OpenVinoRunner(students, quantize_openvino(students, name), {} if is_dense(name) else packed)


def read_openvino(students: StudentFiles, name: str) -> "OpenVinoModel":
    """Returns the student as an OpenVINO model."""
    require_packages("openvino")
    import openvino

    return openvino.Core().read_model(str(export_student(students, name) / ONNX_FILE))


def quantize_openvino(students: StudentFiles, name: str) -> "OpenVinoModel":
    """Returns the student as an int8 OpenVINO model, which is quantized on the first call."""
    require_packages("openvino", "nncf")
    import nncf
    import openvino

    nncf.set_log_level(40)
    file = students.folder(name, "openvino-int8") / "model.xml"
    if not file.exists():
        rows = [dict(batch) for batch in students.samples[:CALIBRATION_TEXTS]]
        model = nncf.quantize(
            read_openvino(students, name),
            nncf.Dataset(rows),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(rows),
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        openvino.save_model(model, str(file), compress_to_fp16=False)
    return openvino.Core().read_model(str(file))


def require_packages(*packages: str) -> None:
    """Checks that packages are installed.

    Raises:
        UnavailableError: One isn't.
    """
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise UnavailableError(f"{name} isn't installed")


class OpenVinoRunner:
    """A compiled model, called with arrays by name."""

    def __init__(self, students: StudentFiles, model: "OpenVinoModel", properties: Mapping[str, object]):
        import openvino

        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": students.threads} | dict(properties)
        compiled = openvino.Core().compile_model(model, "CPU", settings)
        self.request = compiled.create_infer_request()
        self.names = [each.get_any_name() for each in compiled.inputs]

    def __call__(self, inputs: TimedInputs) -> np.ndarray:
        """Returns the logits [rows, classes]."""
        logits: np.ndarray = self.request.infer({name: inputs[name] for name in self.names})[0]
        return logits


@dataclass(frozen=True)
class Runtime:
    """How a runtime opens a student, and whether its logits equal the student's except for rounding in float32."""

    open: Callable[[StudentFiles, str], LogitsRunner]
    is_exact: bool


RUNTIMES = {
    "PyTorch, dense kernels": Runtime(open_torch, is_exact=True),
    "PyTorch, CSR": Runtime(open_torch_csr, is_exact=True),
    "PyTorch, semi-structured": Runtime(open_torch_semi_structured, is_exact=True),
    "ONNX Runtime fp32": Runtime(open_onnx, is_exact=True),
    "ONNX Runtime dynamic int8": Runtime(open_onnx_int8, is_exact=False),
    "OpenVINO fp32": Runtime(open_openvino, is_exact=True),
    "OpenVINO int8": Runtime(open_openvino_int8, is_exact=False),
    "OpenVINO int8, packed zeros": Runtime(open_openvino_packed, is_exact=False),
}
