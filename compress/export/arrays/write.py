"""Writes a student without attention as arrays of numpy, with the code that reads them."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import ExportError
from compress.export.arrays import reader
from compress.export.common.rows import Layer
from distill.checkpoint.custom_models import has_token_vectors

ARRAYS_FILE = "weights.npz"


def export_arrays(model: PreTrainedModel, folder: Path, layers: Mapping[str, Layer]) -> None:
    """Writes `weights.npz` and `reader.py`, which runs the student with numpy and tokenizers only.

    Args:
        model: The student.
        folder: Where to write.
        layers: Its quantized layers and tables by name, which are written as integers; none of a float model.

    Raises:
        ExportError: The model has attention.
    """
    if not has_token_vectors(model):
        raise ExportError(
            f"numpy: expected a student without attention (static, cnn or gru), found a {type(model).__name__}: numpy "
            "has no runtime for it; export onnxruntime"
        )
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: value.detach().float().numpy() for name, value in list_arrays(model).items()}
    for name, layer in layers.items():
        arrays |= list_integers(name.rpartition(".")[2], layer)
    contiguous = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    save = np.savez_compressed if layers else np.savez  # integers shrink by a seventh, floats hardly
    save(folder / ARRAYS_FILE, **contiguous)  # type: ignore[arg-type]
    shutil.copyfile(reader.__file__, folder / "reader.py")


@torch.no_grad()
def list_arrays(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the arrays that the reader names, [inputs, outputs] for each linear layer."""
    vectors: Any = model.base_model
    arrays = {"words": vectors.words.weight}
    if vectors.ngrams is not None:
        arrays["ngrams"] = vectors.ngrams.weight
    if isinstance(vectors.importance, nn.Embedding):
        arrays["importance"] = vectors.importance.weight
    elif vectors.importance is not None:
        arrays |= transpose_linear("importance", vectors.importance)
    if hasattr(vectors.pooling, "scales"):
        arrays["scales"] = vectors.pooling.scales
    if model.config.encoder == "cnn":
        arrays |= transpose_linear("widen", vectors.layers.widen)
        for i, layer in enumerate(vectors.layers.layers):
            arrays[f"convolution.{i}.weight"] = layer.weight.permute(2, 1, 0).flatten(0, 1)
            arrays[f"convolution.{i}.bias"] = layer.bias
    if model.config.encoder == "gru":
        for name, layers in (("forward", vectors.layers.forwards), ("backward", vectors.layers.backwards)):
            for i, layer in enumerate(layers):
                arrays |= list_gates(f"{name}.{i}", layer)
    heads = {name: getattr(model, name) for name in ("dense", "classifier") if hasattr(model, name)}
    for name, layer in heads.items():
        arrays |= transpose_linear(name, layer)
    return arrays


def list_integers(name: str, layer: Layer) -> dict[str, np.ndarray]:
    """Returns the arrays that replace a table or a linear layer's weight: integers, scales and the input's grid."""
    if layer.input_scales == "table":
        return {name: layer.integers, f"{name}.scales": layer.scales}
    grid = {} if layer.grid is None else {f"{name}.grid": np.asarray(layer.grid, np.float32)}
    return {f"{name}.weight": layer.integers.T, f"{name}.weight.scales": layer.scales[:, 0]} | grid


def transpose_linear(name: str, layer: Any) -> dict[str, Tensor]:
    """Returns the arrays of a linear layer."""
    return {f"{name}.weight": layer.weight.T, f"{name}.bias": layer.bias}


def list_gates(name: str, layer: Any) -> dict[str, Tensor]:
    """Returns the arrays of a recurrent layer: what its gates take from the inputs, and from the state."""
    return {
        f"{name}.input.weight": layer.weight_ih_l0.T,
        f"{name}.input.bias": layer.bias_ih_l0,
        f"{name}.state.weight": layer.weight_hh_l0.T,
        f"{name}.state.bias": layer.bias_hh_l0,
    }
