"""Tests exported quantized models: every product matches its layer, and file sizes match the precision."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from compress.errors import CompressError, ExportError
from compress.export.common.parity import layer_differences
from compress.export.common.rows import RowIndex
from compress.export.common.source import Source
from compress.export.common.targets import FORMATS, ExportTarget, by_scheme, check_float, find_target, with_sources
from compress.export.onnx import graph as exporting
from compress.export.onnx.graph import ONNX_FILE, OnnxModel
from compress.export.onnx.int8 import products_saturate
from compress.export.onnx.quantized import quantize_graph
from compress.export.probe import PROBES
from compress.export.runtimes import open_export
from compress.export.write import check_layers, write_target, write_targets
from compress.quantize.calibration import calibrate
from compress.quantize.prepare import convert_quantized, find_lowest_precision, prepare_quantized
from compress.quantize.schemes import SCHEMES, reduce_weight_range, resolve_scheme
from support.commands import ROOT
from support.tiny_models import build_model, word_tokenizer

LAYERS = 2
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96}  # groups of 32 divide them
HOLDING = {
    name: form
    for name, form in FORMATS.items()
    if form.supports_quantized and form.attention and name != "onnx-decoder"
}
ALL_PAIRS = [(scheme, name) for scheme in SCHEMES for name in HOLDING]
SUPPORTED = [(scheme, name) for scheme, name in ALL_PAIRS if scheme not in FORMATS[name].unsupported]
BY_TOKEN = [scheme.name for scheme in SCHEMES.values() if scheme.input_scales == "token"]
DECODERS = [(name, "compressed-tensors") for name in BY_TOKEN]  # covered by test_compressed_tensors.py
TAKES_LONG = [("int4-dynamic", "executorch"), ("int8-dynamic", "executorch"), ("int8-weights", "litert")]
TAKES_LONG += [("int4-weights", "openvino"), ("int8-weights", "openvino"), ("int4-weights", "onnx")]
TAKES_LONG += [("int8-weights", "onnx"), ("int8-dynamic", "onnx"), ("int8-static", "onnx")]  # onnxruntime has them too
TAKES_LONG += [("int4-dynamic", "onnx"), ("int4-dynamic", "litert"), ("int8-weights", "onnxruntime")]
TAKES_LONG += [("int8-static", "openvino"), ("int4-dynamic", "onnxruntime"), ("int8-groups", "onnxruntime")]
TAKES_LONG += [("int4-weights", "onnxruntime")]
FILES = (".onnx", ".bin", ".pte", ".tflite", ".safetensors")
MARKS = dict.fromkeys(TAKES_LONG, pytest.mark.slow)
HELD_MARKED = [pytest.param(*pair, marks=MARKS.get(pair, ())) for pair in SUPPORTED if pair not in DECODERS]


def padded_batch() -> dict[str, np.ndarray]:
    """Returns a padded batch of 6 texts and 12 tokens."""
    ids = np.random.default_rng(5).integers(5, 60, (6, 12))
    mask = (np.arange(12) < np.asarray([12, 7, 12, 3, 9, 12])[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}


def quantized_source(scheme: str, **changes: int) -> Source:
    """Builds a quantized model, with 7-bit weights where this processor needs them."""
    model, chosen = build_model("bert", **SIZES | changes), resolve_scheme(scheme)
    prepare_quantized(model, reduce_weight_range(chosen) if products_saturate() else chosen)
    calibrate(model, [{name: torch.from_numpy(value) for name, value in padded_batch().items()}])
    tokenizer = word_tokenizer()
    return Source(model.eval(), tokenizer, convert_quantized(model))


Files = Callable[[str, str], tuple[Source, ExportTarget, Path]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """`files(scheme, format)` -> (model, target, folder of all targets), exported once."""

    @cache
    def source(scheme: str) -> tuple[Source, Path]:
        return quantized_source(scheme), tmp_path_factory.mktemp(scheme)

    @cache
    def write(scheme: str, form: str) -> tuple[Source, ExportTarget, Path]:
        model, folder = source(scheme)
        if form in ("executorch", "litert"):  # they take seconds per layer
            model, folder = quantized_source(scheme, num_hidden_layers=1), tmp_path_factory.mktemp(form)
            model.tokenizer.model_max_length = 16
        assert model.quantization is not None
        target = ExportTarget(form, find_lowest_precision(model.quantization))
        for each in with_sources([target]):
            if not (folder / str(each)).exists():  # exporting a float graph takes seconds
                write_target(model, each, folder)
        return model, target, folder

    return write


@pytest.mark.parametrize(("scheme", "form"), HELD_MARKED)
def test_every_product_in_a_file_matches_its_layers(scheme: str, form: str, files: Files):
    source, target, folder = files(scheme, form)
    products = PROBES[form](source, target, folder, padded_batch())
    inside = form == "onnxruntime" and scheme == "int8-static"  # products inside QAttention aren't visible
    apart = (
        6 if form in ("torchao", "executorch", "litert", "compressed-tensors") else 4
    )  # a graph computes queries, keys and values in one product or in three
    layers = source.model.config.num_hidden_layers
    assert len(products) in ({layers * 3 + 2} if inside else {layers * apart + 2, layers * 6 + 2})
    assert max(layer_differences(products, source.reference).values()) <= 1e-5
    assert all(np.abs(seen.output).max() > 0.01 for seen in products.values())


@pytest.mark.parametrize(("scheme", "form"), HELD_MARKED)
def test_a_file_computes_the_models_logits_and_has_the_expected_size(scheme: str, form: str, files: Files):
    source, target, folder = files(scheme, form)
    expected = source.runner(padded_batch())
    found = open_export(target, folder / str(target), 1)(padded_batch())
    # A difference in the last bit can move an activation by one quantization step.
    limit = 1e-4 if resolve_scheme(scheme).input_scales == "float" else 0.05 * np.abs(expected).max()
    assert np.abs(found - expected).max() <= limit
    weights = sum(p.numel() for p in source.model.parameters() if p.dim() == 2)
    files_made = (folder / str(target)).iterdir()
    size = sum(file.stat().st_size for file in files_made if file.suffix in FILES)
    packed = scheme.startswith("int4") and form != "torchao"
    assert source.quantization is not None
    scales = 4 * sum(quantized.scales.numel() for quantized in source.quantization.values())
    if form == "compressed-tensors":  # that format stores tables in float
        tables = [name for name, quantized in source.quantization.items() if quantized.scheme is None]
        scales += 3 * sum(source.model.get_submodule(name).weight.numel() for name in tables)
    assert size - scales < (0.95 if packed else 1.1) * weights + {"executorch": 130_000}.get(form, 80_000)


def test_each_format_gets_the_best_scheme_that_it_supports_at_the_requested_bits():
    assert by_scheme(["onnx", "executorch", "openvino"], "int8") == {
        "int8-static": ["onnx", "openvino"],
        "int8-dynamic": ["executorch"],
    }
    assert by_scheme(["executorch", "litert"], "int8") == {"int8-dynamic": ["executorch", "litert"]}
    assert by_scheme(["onnx", "executorch"], "int4") == {"int4-weights": ["onnx"], "int4-dynamic": ["executorch"]}


def test_formats_that_hold_only_integers_reject_float_models():
    with pytest.raises(CompressError, match="export torchao: expected a quantized model, found runs/x, in float"):
        check_float(["onnx", "torchao"], "runs/x")


@pytest.mark.parametrize(("scheme", "form"), [pair for pair in ALL_PAIRS if pair not in SUPPORTED])
def test_a_format_rejects_schemes_that_it_does_not_support(scheme: str, form: str, tmp_path):
    with pytest.raises(CompressError, match=f"export {form}: doesn't support {scheme}: "):
        by_scheme([form], scheme)
    source = quantized_source(scheme)
    assert source.quantization is not None
    with pytest.raises(CompressError, match=f"doesn't support {scheme}: "):
        write_targets(source, [ExportTarget(form, find_lowest_precision(source.quantization))], tmp_path)
    assert not list(tmp_path.iterdir()), "a float model was exported first"


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s not in FORMATS["torchao"].unsupported])
def test_a_stock_class_computes_the_models_logits_from_a_torchao_checkpoint(scheme: str, files: Files):
    source, target, folder = files(scheme, "torchao")
    model = AutoModelForSequenceClassification.from_pretrained(folder / str(target)).eval()
    batch = {name: torch.from_numpy(padded_batch()[name]) for name in source.inputs}
    with torch.no_grad():
        found, expected = model(**batch).logits, source.reference(**batch).logits
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()
    kind = type(model.bert.encoder.layer[1].output.dense.weight).__name__
    assert kind in ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")


def test_static_int8_files_for_onnxruntime_use_fused_operators(files: Files):
    source, target, folder = files("int8-static", "onnxruntime")
    kinds = Counter(node.op_type for node in onnx.load(folder / str(target) / ONNX_FILE).graph.node)
    assert kinds["QAttention"] == LAYERS
    assert kinds["MatMulIntegerToFloat"] == 3 * LAYERS + 2
    assert kinds["MatMul"] + kinds["Gemm"] + kinds["Attention"] == 0
    assert np.isfinite(OnnxModel(folder / str(target), 1)(padded_batch())).all()


def test_a_file_with_other_scales_than_the_model_is_rejected(files: Files):
    source, target, folder = files("int8-static", "onnxruntime")
    assert check_layers(source, target, folder, padded_batch()) <= 1e-5
    other = quantized_source("int8-static")
    name = "bert.encoder.layer.1.output.dense"
    other.reference.get_submodule(name).grid.scale.mul_(1.02)
    with pytest.raises(ExportError, match=rf"onnxruntime-int8: {name} has other outputs"):
        check_layers(other, target, folder, padded_batch())


def test_concatenated_rows_of_several_layers_are_found():
    layers = quantized_source("int8-static").layers
    layer_names = [f"bert.encoder.layer.0.attention.self.{part}" for part in ("query", "key", "value")]
    whole = np.concatenate([layers[name].weight for name in layer_names])
    layer, names = RowIndex(layers).find(whole)
    assert names == layer_names
    assert np.array_equal(layer.integers, np.concatenate([layers[name].integers for name in layer_names]))
    assert RowIndex(layers).find(whole + 1) is None
    mixed = np.concatenate([layers[layer_names[0]].weight, layers["bert.encoder.layer.0.intermediate.dense"].weight])
    with pytest.raises(ExportError, match="quantized in 2 different ways"):
        RowIndex(layers).find(mixed)


def test_weights_stored_beside_the_file_are_quantized_like_those_inside(files: Files, tmp_path, monkeypatch):
    source, _, folder = files("int4-groups", "onnxruntime")
    inside, apart = folder / "onnx" / ONNX_FILE, tmp_path / "apart" / ONNX_FILE
    apart.parent.mkdir()
    onnx.save(onnx.load(str(inside)), str(apart), save_as_external_data=True, location="weights", size_threshold=0)
    quantize_graph(inside, tmp_path / "one" / ONNX_FILE, source.layers)
    monkeypatch.setattr(exporting, "LARGEST", 1000)
    quantize_graph(apart, tmp_path / "two" / ONNX_FILE, source.layers)
    assert (tmp_path / "two" / f"{ONNX_FILE}.data").exists()
    inputs = {name: value.astype(np.int64) for name, value in padded_batch().items()}
    one, two = (OnnxModel(tmp_path / name, threads=1)(inputs) for name in ("one", "two"))
    np.testing.assert_array_equal(one, two)


def test_the_graph_of_another_model_is_rejected(files: Files, tmp_path):
    _, _, folder = files("int8-static", "onnx")
    source = quantized_source("int4-weights")
    with pytest.raises(ExportError, match=r"no product with the weights of bert.* \(14 of 14 layers that round\)"):
        quantize_graph(folder / "onnx" / ONNX_FILE, tmp_path / ONNX_FILE, source.layers)


def test_a_quantized_target_rejects_a_float_model(files: Files, tmp_path):
    source = Source(build_model("bert", **SIZES).eval(), quantized_source("int8-weights").tokenizer)
    with pytest.raises(CompressError, match=r"onnx-int8: expected a quantized model, found one in float"):
        write_targets(source, [ExportTarget("onnx", "int8")], tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_table_in_the_docs_matches_the_formats():
    text = (ROOT / "docs" / "howto" / "quantize.md").read_text()
    lines = text[text.index("| format |") :].split("\n\n")[0].splitlines()
    schemes = [cell.strip() for cell in lines[0].split("|")[2:-1]]
    assert schemes == list(SCHEMES)
    expected = {}
    for line in lines[2:]:
        name, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        expected[name.strip("`")] = {s for s, cell in zip(schemes, cells, strict=True) if cell == "no"}
    assert expected == {name: set(form.unsupported) for name, form in FORMATS.items() if form.supports_quantized}


def test_target_names_match_their_folders_and_sources_precede_them():
    names = ["onnx", "onnxruntime-int8", "openvino-int4", "torchao-int8", "huggingface"]
    assert [str(find_target(name)) for name in names] == names
    chain = with_sources([find_target("openvino-int8"), find_target("onnxruntime-int8")])
    assert [str(target) for target in chain] == [
        "onnx",
        "onnx-int8",
        "openvino-int8",
        "onnxruntime",
        "onnxruntime-int8",
    ]
    for wrong in ("torchao", "compressed-tensors", "huggingface-int8", "tflite"):
        with pytest.raises(CompressError, match=f"found '{wrong}'"):
            find_target(wrong)
