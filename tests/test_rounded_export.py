"""ONNX files of models that round: every product is that of the layer it came from, and bytes are as few as said."""

import copy
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from compress.errors import ArtefactError
from compress.export.fuse import fuse
from compress.export.onnx import FILE, OnnxModel, export_onnx
from compress.export.parity import layer_differences
from compress.export.rounded import round_graph, round_joined
from compress.export.rows import Rows, layers_of
from compress.quantize.prepare import convert, prepare, restore
from compress.quantize.ranges import calibrate
from compress.quantize.schemes import SCHEMES, scheme_of
from conftest import build_model

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # groups of 32 divide them


INPUTS = ("input_ids", "attention_mask")


def rounded(name: str, batch: dict) -> tuple[nn.Module, nn.Module, dict]:
    """(converted model, the same that rounds, its layers)"""
    model = build_model("bert", **SIZES)
    prepare(model, scheme_of(name))
    calibrate(model, [batch])
    rounding = convert(model)
    reference = copy.deepcopy(model)
    restore(reference, rounding)
    return model, reference, layers_of(model, rounding)


def made(name: str, batch: dict, tokenizer, folder: Path) -> tuple[nn.Module, dict]:
    """(model that rounds, its layers); the plain ONNX file is in the folder."""
    model, reference, layers = rounded(name, batch)
    export_onnx(model, tokenizer, folder, INPUTS)
    return reference, layers


@pytest.mark.parametrize("name", list(SCHEMES))
def test_a_product_is_not_its_layers(name: str, token_batch, tokenizer, tmp_path):
    reference, layers = made(name, token_batch, tokenizer, tmp_path / "plain")
    written = round_graph(tmp_path / "plain" / FILE, tmp_path / "rounded" / FILE, layers)
    assert written.left == []
    assert len(written.products) == 6 * 4 + 2
    batch = {n: v.numpy() for n, v in token_batch.items()}
    differences = layer_differences(tmp_path / "rounded" / FILE, written.products, reference, batch)
    assert max(differences.values()) <= 1e-5
    with torch.no_grad():
        expected = reference(**token_batch).logits.numpy()
    found = OnnxModel(tmp_path / "rounded", 1)(batch)
    limit = 1e-4 if scheme_of(name).inputs == "float" else 0.05 * np.abs(expected).max()
    assert np.abs(found - expected).max() <= limit
    weights = sum(p.numel() for n, p in reference.named_parameters() if p.dim() == 2)
    size = (tmp_path / "rounded" / FILE).stat().st_size - 4 * sum(layer.scales.size for layer in layers.values())
    assert size < (0.95 if name == "int4-weights" else 1.1) * weights + 40_000


def test_joined_operators_compute_something_else(token_batch, tokenizer, tmp_path):
    reference, layers = made("int8-static", token_batch, tokenizer, tmp_path / "plain")
    fuse(tmp_path / "plain" / FILE, tmp_path / "joined" / FILE)
    written = round_joined(tmp_path / "joined" / FILE, tmp_path / "rounded" / FILE, layers)
    assert written.left == []
    assert len(written.products) == 3 * 4 + 2, "attention's own are inside it"
    batch = {n: v.numpy() for n, v in token_batch.items()}
    differences = layer_differences(tmp_path / "rounded" / FILE, written.products, reference, batch)
    assert max(differences.values()) <= 1e-5
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "rounded" / FILE).graph.node)
    assert kinds["QAttention"] == 4
    assert kinds["MatMulIntegerToFloat"] == 14
    assert kinds["MatMul"] + kinds["Gemm"] + kinds["Attention"] == 0
    with torch.no_grad():
        expected = reference(**token_batch).logits.numpy()
    found = OnnxModel(tmp_path / "rounded", 1)(batch)
    assert np.abs(found - expected).max() <= 0.05 * np.abs(expected).max()
    name = "bert.encoder.layer.1.output.dense"
    reference.get_submodule(name).grid.scale.mul_(1.02)
    differences = layer_differences(tmp_path / "rounded" / FILE, written.products, reference, batch)
    assert differences.pop(name) > 1e-3, "what isn't the layer is told"
    assert max(differences.values()) <= 1e-5


def test_rows_of_several_layers_are_not_found_side_by_side(token_batch):
    _, _, layers = rounded("int8-static", token_batch)
    own = [f"bert.encoder.layer.0.attention.self.{part}" for part in ("query", "key", "value")]
    whole = np.concatenate([layers[name].weight for name in own])
    found, names = Rows(layers).find(whole)
    assert names == own
    assert np.array_equal(found.integers, np.concatenate([layers[name].integers for name in own]))
    assert Rows(layers).find(whole + 1) is None
    mixed = np.concatenate([layers[own[0]].weight, layers["bert.encoder.layer.0.intermediate.dense"].weight])
    with pytest.raises(ArtefactError, match="rounded in 2 different ways"):
        Rows(layers).find(mixed)


def test_another_models_graph_is_rounded(token_batch, tokenizer, tmp_path):
    _, _, layers = rounded("int8-weights", token_batch)
    export_onnx(build_model("bert", **SIZES), tokenizer, tmp_path / "other", INPUTS)
    with pytest.raises(ArtefactError, match="no product with the weights"):
        round_graph(tmp_path / "other" / FILE, tmp_path / "rounded" / FILE, layers)
