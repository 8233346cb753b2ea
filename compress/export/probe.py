"""Input and output of each matrix product in exported files, computed on a batch in the runtime they are for."""

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.export.common.parity import Product
from compress.export.common.quiet import quiet
from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.onnx.generate import PAST
from compress.export.onnx.graph import ONNX_FILE, open_session
from compress.export.onnx.quantized import PRODUCTS
from distill.checkpoint.custom_models import load_model_folder

ProbeInputs = Mapping[str, np.ndarray]
Probe = Callable[[Source, ExportTarget, Path, ProbeInputs], dict[str, Product]]


def expose_onnx_products(file: Path) -> tuple[Any, dict[str, tuple[str, str]]]:
    """Returns an ONNX file with its products' inputs and outputs as extra outputs, and their names by layer."""
    import onnx

    model = onnx.load(str(file))
    products = json.loads(next(each.value for each in model.metadata_props if each.key == PRODUCTS))
    outputs = {value.name for value in model.graph.output}
    wanted = dict.fromkeys(name for pair in products.values() for name in pair)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in outputs)
    return model, {name: tuple(pair) for name, pair in products.items()}


def probe_onnx(source: Source, target: ExportTarget, folder: Path, inputs: ProbeInputs) -> dict[str, Product]:
    """Returns the products of an ONNX graph's layers, on texts without earlier tokens."""
    model, products = expose_onnx_products(folder / str(target) / ONNX_FILE)
    session = open_session(model.SerializeToString(), threads=1)
    wanted = list(dict.fromkeys(name for pair in products.values() for name in pair))
    values = dict(zip(wanted, session.run(wanted, list_graph_inputs(session, inputs)), strict=True))
    return {name: Product(values[x], values[y]) for name, (x, y) in products.items()}


def list_graph_inputs(session: Any, inputs: ProbeInputs) -> dict[str, np.ndarray]:
    """Returns the inputs of a graph; a decoder's positions count tokens, and its cache has none."""
    mask = inputs["attention_mask"]
    known = {**inputs, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    shapes = {value.name: value.shape for value in session.get_inputs()}
    caches = {name: (len(mask), shape[1], 0, shape[3]) for name, shape in shapes.items() if name.startswith(PAST)}
    return {n: np.zeros(caches[n], np.float32) if n in caches else known[n] for n in shapes}


def probe_openvino(source: Source, target: ExportTarget, folder: Path, inputs: ProbeInputs) -> dict[str, Product]:
    """Returns the products of the ONNX file behind the OpenVINO target, converted and run in the same way."""
    import onnx

    from compress.export.openvino.ir import OPENVINO_FILE, OpenVinoModel, export_openvino

    assert target.made_from is not None
    model, products = expose_onnx_products(folder / str(target.made_from) / ONNX_FILE)
    with tempfile.TemporaryDirectory() as directory:
        onnx.save(model, str(Path(directory) / ONNX_FILE))
        export_openvino(Path(directory) / ONNX_FILE, Path(directory) / OPENVINO_FILE)
        values = OpenVinoModel(Path(directory), threads=1).values(inputs)
    return {name: Product(values[x], values[y]) for name, (x, y) in products.items()}


def probe_executorch(source: Source, target: ExportTarget, folder: Path, inputs: ProbeInputs) -> dict[str, Product]:
    """Returns the products of an ExecuTorch program's layers."""
    from compress.export.executorch.program import run_executorch_products

    return run_executorch_products(source, inputs)


def probe_litert(source: Source, target: ExportTarget, folder: Path, inputs: ProbeInputs) -> dict[str, Product]:
    """Returns the products of a LiteRT file's layers."""
    from compress.export.litert.model import LITERT_FILE, run_litert_products

    return run_litert_products(folder / str(target) / LITERT_FILE, source, inputs)


def probe_arrays(source: Source, target: ExportTarget, folder: Path, inputs: ProbeInputs) -> dict[str, Product]:
    """Returns the products of the quantized layers that numpy computes."""
    from compress.export.arrays.reader import Reader

    products: dict[str, Product] = {}
    names = {name.rpartition(".")[2]: name for name, layer in source.layers.items() if layer.input_scales != "table"}

    class RecordingReader(Reader):
        def apply_linear(self, name: str, x: np.ndarray) -> np.ndarray:
            outputs: np.ndarray = super().apply_linear(name, x)
            if name in names:
                products[names[name]] = Product(x, outputs, biased=True)
            return outputs

    RecordingReader(folder / str(target))(inputs)
    return products


@torch.inference_mode()
def probe_checkpoint(source: Source, target: ExportTarget, folder: Path, inputs: ProbeInputs) -> dict[str, Product]:
    """Returns the products of the linear layers of the reloaded checkpoint."""
    assert source.quantization is not None
    products: dict[str, Product] = {}
    with quiet():
        model = load_model_folder(folder / str(target))
        for name, quantized in source.quantization.items():
            if quantized.scheme is not None:
                model.get_submodule(name).register_forward_hook(partial(record_product, products, name))
        model(**{name: torch.from_numpy(inputs[name]) for name in source.inputs})
    return products


def record_product(
    products: dict[str, Product], name: str, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor
) -> None:
    """Records the input and output of a layer, as a forward hook."""
    products[name] = Product(inputs[0].numpy(), out.numpy(), biased=True)


PROBES: dict[str, Probe] = {
    "onnx": probe_onnx,
    "onnxruntime": probe_onnx,
    "onnx-decoder": probe_onnx,
    "openvino": probe_openvino,
    "executorch": probe_executorch,
    "litert": probe_litert,
    "torchao": probe_checkpoint,
    "compressed-tensors": probe_checkpoint,
    "numpy": probe_arrays,
}
