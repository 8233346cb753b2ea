"""int8 for processors with and without VNNI: 7 bits where int8 products saturate, or a rejection before training."""

import json
import platform
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from compress.errors import CompressError
from compress.export.common.huggingface import input_names
from compress.export.onnx.fuse import fuse_operators
from compress.export.onnx.graph import ONNX_FILE, OnnxModel, export_onnx
from compress.export.onnx.int8 import products_saturate, quantize_int8
from compress.export.processors import resolve_reduce_range
from compress.quantize.config import QuantizeConfig
from compress.quantize.model import quantize_model
from compress.quantize.prepare import convert_quantized, prepare_quantized
from compress.quantize.schemes import resolve_scheme, widen_scheme
from compress.quantize.store import load_quantization
from pipelines import distill, export
from pipelines.reports.wording import Comparison, describe_parity
from pipelines.settings.commands.distill import DistillConfig, StudentConfig, TeacherConfig
from pipelines.settings.schemes import quantization_by
from pipelines.stages.run_stages import reported_settings
from support.commands import rejection_of, run_to_success, small_run
from support.run_inputs import make_inputs, stage_folder
from support.saturating import python_without_vnni
from support.tiny_families import build
from support.tiny_models import build_model, saved

ENOUGH = {"avx512_vnni", "avx_vnni"}


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file() or platform.machine() != "x86_64", reason="x86 Linux alone")
def test_products_saturate_where_the_processor_has_no_vnni():
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    assert products_saturate() == (not ENOUGH & set(flags.split()))


def settings_of(**quantize: object) -> DistillConfig:
    export = str(quantize.pop("export", "onnx"))
    return DistillConfig(
        output="x",
        teacher=TeacherConfig(model="t"),
        student=StudentConfig(spec="layers=2"),
        data=type(DistillConfig.__dataclass_fields__["data"].default_factory())(path="d"),
        quantize=QuantizeConfig(**quantize),
        export=export,
    )


@pytest.mark.parametrize(
    ("scheme", "export", "reduce_range"),
    [
        ("int8-static", "onnx", True),
        ("int8-static", "openvino", True),
        ("int8-dynamic", "onnxruntime", True),
        ("int4-dynamic", "onnx", True),  # sensitive layers and tied heads have 8 bits
        ("int8-dynamic", "litert,torchao", False),
        ("int8-weights", "onnx", False),
        ("fp8-dynamic", "torchao", False),
    ],
)
def test_files_have_7_bits_where_their_runtime_saturates_on_the_processor(scheme: str, export: str, reduce_range: bool):
    processor = "here" if scheme in ("int8-weights", "fp8-dynamic") else "avx2"
    config = settings_of(scheme=scheme, export=export, processor=processor)
    assert quantization_by(config, scheme).reduce_range is reduce_range


def test_each_int8_scheme_has_the_bits_that_its_files_need():
    config = settings_of(scheme="int8", export="onnx,litert", processor="avx512")
    assert [quantization_by(config, name).reduce_range for name in ("int8-static", "int8-dynamic")] == [True, False]


def test_the_report_contains_the_resolved_bits():
    config = settings_of(scheme="int8", export="onnx,litert", processor="avx2")
    assert reported_settings(config)["quantize"]["reduce_range"] == {"int8-static": True, "int8-dynamic": False}
    config = settings_of(scheme="int8-static", processor="avx2")
    assert reported_settings(config)["quantize"]["reduce_range"] is True
    parity = {"rows": 8, "layers": 1e-7, "agreement": 1.0, "load_ms": 1.0, "peak_bytes": 1}
    entry = {"name": "student", "runtime": "onnxruntime", "precision": "int8"}
    compared = Comparison("texts", "class")
    sentences = [describe_parity(entry, parity | bits, compared) for bits in ({}, {"weight_bits": 7})]
    assert ["use 7 of 8 bits" in each for each in sentences] == [False, True]


def test_auto_resolves_to_the_bits_that_the_local_processor_needs():
    assert resolve_reduce_range("auto", "here", ["onnx"]) is products_saturate()
    assert resolve_reduce_range("auto", "here", ["executorch", "litert"]) is False
    assert resolve_reduce_range(True, "here", ["litert"]) is True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scheme": "int8", "reduce_range": True, "processor": "avx2"},
            "quantize.processor avx2: expected quantize.reduce_range a",
        ),
        (
            {"scheme": "fp8-dynamic", "processor": "avx2"},
            "quantize.processor: expected a scheme with integer products",
        ),
        (
            {"scheme": "int8-weights", "reduce_range": True},
            "quantize.reduce_range: expected a scheme with integer products",
        ),
    ],
)
def test_settings_without_effect_on_int8_products_are_rejected(settings: dict, message: str):
    with pytest.raises(CompressError, match=message):
        QuantizeConfig(**settings)


def test_sensitive_layers_and_tied_heads_avoid_8_bit_products_when_reduced(token_batch):
    assert widen_scheme(resolve_scheme("int4-dynamic"), reduce_range=True).bits == 7
    assert widen_scheme(resolve_scheme("int4-dynamic")).bits == 8
    for reduce_range, inputs in ((True, "float"), (False, "token")):
        model = build("qwen2", hidden_size=64, intermediate_size=96)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        prepare_quantized(model, resolve_scheme("int4-dynamic"), reduce_range=reduce_range)
        assert model.lm_head.scheme.input_scales == inputs
    model = build_model("bert", hidden_size=64, intermediate_size=96)
    quantize_model(model, QuantizeConfig(scheme="int8-dynamic", reduce_range=True), [token_batch])
    stored = {
        name: r.quantize(model.get_submodule(name).weight) for name, r in convert_quantized(model).items() if r.scheme
    }
    assert max(int(each.abs().max()) for each in stored.values()) == 63


# --- through the command line


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> tuple[Path, Path]:
    """(a classifier, data)"""
    folder = tmp_path_factory.mktemp("inputs")
    _, data = make_inputs(folder)
    return saved(build_model("bert"), tokenizer, folder / "classifier"), data


def quantize_arguments(inputs: tuple[Path, Path], output: Path, *more: str) -> list[str]:
    teacher, data = inputs
    return [
        *("--model", str(teacher), "--data", str(data), "--output", str(output), "--method", "ptq"),
        *("--quantize.samples", "32", "--measure.texts", "4", "--measure.rounds", "1", "--measure.batch", "2"),
        *("--data.max_length", "24", "--export", "onnxruntime", *more),
    ]


@pytest.mark.slow
def test_a_named_processor_gets_weights_of_the_bits_it_needs(inputs, tmp_path):
    output = tmp_path / "run"
    arguments = quantize_arguments(inputs, output, "--scheme", "int8-static", "--until", "distill")
    message = run_to_success("quantize", [*arguments, "--quantize.processor", "avx2"])
    assert "with 7-bit weights" in message
    stage = stage_folder(output, "quantize")
    stored = json.loads((stage / "manifest.json").read_text())["config"]["quantize"]
    assert stored["reduce_range"] is True
    assert "processor" not in stored, "it says nothing more than reduce_range, and would make the stage again"
    assert {each.scheme.bits for each in load_quantization(stage / "model").values() if each.scheme is not None} == {7}
    # the same bits requested by another flag are the same stage; other bits, as on a processor with VNNI, are another
    plan = run_to_success("quantize", [*arguments, "--quantize.reduce_range", "--dry-run", "--predict", "false"])
    assert "complete, will be skipped" in next(line for line in plan.splitlines() if " quantize " in line)
    plan = run_to_success("quantize", [*arguments, "--dry-run", "--predict", "false"])
    expected = "complete, will be skipped" if products_saturate() else "will run"
    assert expected in next(line for line in plan.splitlines() if " quantize " in line)


@pytest.mark.slow
def test_onnxruntimes_own_int8_has_7_bits_for_a_named_processor(inputs, tmp_path):
    teacher, data = inputs
    arguments = ["--model", str(teacher), "--data", str(data), "--export", "onnxruntime", "--dynamic", "--parity", "8"]
    run_to_success("export", [*arguments, "--processor", "avx512", "--output", str(tmp_path / "x")])
    (file,) = (tmp_path / "x").rglob(f"onnxruntime-int8/{ONNX_FILE}")
    assert largest_weight(file) <= 64
    entries = json.loads(next((tmp_path / "x").rglob("evaluation.json")).read_text())
    assert [each["parity"].get("weight_bits") for each in entries if each["precision"] == "int8"] == [7]


def largest_weight(file: Path) -> int:
    """Returns the largest absolute int8 weight of the multiplied matrices; lookup tables are ignored."""
    graph = onnx.load(file).graph
    read = {name for node in graph.node if node.op_type != "Gather" for name in node.input}
    matrices = [each for each in graph.initializer if each.data_type == onnx.TensorProto.INT8 and len(each.dims) == 2]
    return max(int(np.abs(onnx.numpy_helper.to_array(m).astype(int)).max()) for m in matrices if m.name in read)


@pytest.mark.slow
def test_an_embedding_table_keeps_8_bits_when_matrices_have_7(tmp_path, tokenizer: PreTrainedTokenizerBase):
    model = build_model("bert")
    whole, joined, small = (tmp_path / name / ONNX_FILE for name in ("whole", "joined", "small"))
    export_onnx(model, tokenizer, whole.parent, input_names(model.config))
    fuse_operators(whole, joined)
    quantize_int8(joined, small, reduce_range=True)
    assert largest_weight(small) <= 64
    graph = onnx.load(small).graph
    rows = {name for node in graph.node if node.op_type == "Gather" for name in node.input}
    tables = [each for each in graph.initializer if each.name in rows and len(each.dims) == 2 and each.dims[1] > 1]
    values = [onnx.numpy_helper.to_array(each) for each in tables]
    assert tables
    assert all(each.dtype == np.int8 for each in values)
    assert max(int(np.ptp(each.astype(int))) for each in values) > 128
    batch = tokenizer(["where is my card"], return_tensors="np")
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in batch.items()}).logits.numpy()
    found = OnnxModel(small.parent, threads=1)({name: value.astype(np.int64) for name, value in batch.items()})
    assert np.abs(found - expected).mean() < expected.std() / 3


# --- processors whose int8 products saturate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("quantize", ["--quantize.reduce_range", "false"], "quantize.reduce_range false: expected a processor here"),
        ("quantize", ["--quantize.processor", "vnni"], "quantize.processor vnni: expected a processor here"),
        (
            "distill",
            ["--speedup", "2", "--quantize.reduce_range", "false"],
            "--quantize.reduce_range true gives weights 7 bits",
        ),
    ],
)
def test_unverifiable_8_bit_weights_are_rejected_before_training(command, arguments, message, inputs, tmp_path):
    output = tmp_path / "run"
    run_arguments = quantize_arguments(inputs, output) if command == "quantize" else small_run(*inputs, output)
    done = python_without_vnni(["-m", f"pipelines.{command}", *run_arguments, *arguments])
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()


READ = "import sys, numpy as np; from compress.export.onnx.graph import OnnxModel; from pathlib import Path; "
READ += "np.save(sys.argv[3], OnnxModel(Path(sys.argv[1]), 1)(dict(np.load(sys.argv[2]))))"


@pytest.mark.slow
def test_a_7_bit_file_is_as_accurate_on_a_processor_without_vnni(tmp_path, tokenizer: PreTrainedTokenizerBase):
    model = build_model("bert")
    export_onnx(model, tokenizer, tmp_path / "whole", input_names(model.config))
    fuse_operators(tmp_path / "whole" / ONNX_FILE, tmp_path / "joined" / ONNX_FILE)
    quantize_int8(tmp_path / "joined" / ONNX_FILE, tmp_path / "small" / ONNX_FILE, reduce_range=True)
    ids = np.random.default_rng(0).integers(5, 60, (8, 12))
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    np.savez(tmp_path / "batch.npz", **batch)
    done = python_without_vnni(
        ["-c", READ, str(tmp_path / "small"), str(tmp_path / "batch.npz"), str(tmp_path / "out.npy")]
    )
    assert done.returncode == 0, done.stderr
    found, local = np.load(tmp_path / "out.npy"), OnnxModel(tmp_path / "small", 1)(batch)
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in batch.items()}).logits.numpy()
    # The error must be that of rounding, as on this processor; saturated products would cause several times as much.
    assert np.abs(found - expected).mean() <= 1.5 * np.abs(local - expected).mean()


def test_an_unknown_processor_is_rejected_with_the_known_ones(monkeypatch, capsys, tmp_path):
    for module in (distill, export):
        flag = "--quantize.processor" if module is distill else "--processor"
        message = rejection_of(module, [flag, "sparc"], monkeypatch, capsys)
        assert "avx2" in message
        assert "vnni" in message
