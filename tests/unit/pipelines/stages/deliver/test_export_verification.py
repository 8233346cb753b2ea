"""Tests that exports that don't match the model, and targets built from them, are set aside with the reason."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.onnx.graph import ONNX_FILE
from compress.export.onnx.int8 import products_saturate
from compress.quantize.calibration import calibrate
from compress.quantize.prepare import convert_quantized, prepare_quantized
from compress.quantize.schemes import reduce_weight_range, resolve_scheme
from distill.data.splits.examples import Examples
from pipelines.stages.deliver import export_verification as proofs
from pipelines.stages.deliver.evaluate import compare_with_teacher
from pipelines.stages.deliver.export_verification import ExportVerifier
from pipelines.stages.deliver.latencies import Measured, describe_speedup
from pipelines.stages.prepare.compared_texts import hash_texts
from support.tiny_models import MAX_LENGTH, build_model, make_rows, word_tokenizer

TEXTS = 400  # one text is 0.25 percentage points


@pytest.fixture(scope="module")
def source() -> Source:
    torch.manual_seed(0)
    model = build_model("bert", num_hidden_layers=2)
    scheme = resolve_scheme("int8-static")
    prepare_quantized(model, reduce_weight_range(scheme) if products_saturate() else scheme)
    ids = torch.randint(5, 60, (6, 12))
    calibrate(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    tokenizer = word_tokenizer()
    return Source(model.eval(), tokenizer, convert_quantized(model))


@pytest.fixture
def verifier(source: Source, tmp_path: Path) -> ExportVerifier:
    texts = [text for text, _ in make_rows(TEXTS, 2)]
    verifier = ExportVerifier(source, tmp_path, Examples(texts), (texts[:8], None), MAX_LENGTH)
    verifier.examples = Examples(texts, None, [int(row) for row in verifier.quantized_logits.argmax(-1)])
    return verifier


def corrupt_target(monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    """Patches exporting so that the file of one target gets a scale that isn't the model's."""

    def write(source: Source, target: ExportTarget, folder: Path) -> None:
        write_target(source, target, folder)
        if str(target) == spoilt:
            file = folder / spoilt / ONNX_FILE
            model = onnx.load(str(file))
            scaled = next(node.input[1] for node in model.graph.node if node.op_type == "DequantizeLinear")
            scale = next(each for each in model.graph.initializer if each.name == scaled)
            values = 1.2 * onnx.numpy_helper.to_array(scale)
            scale.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), scale.name))
            onnx.save(model, str(file))

    write_target = proofs.write_target
    monkeypatch.setattr(proofs, "write_target", write)


def test_a_file_with_wrong_outputs_and_targets_built_from_it_are_set_aside(verifier, monkeypatch):
    corrupt_target(monkeypatch, "onnx-int8")
    for target in (
        ExportTarget("onnx"),
        ExportTarget("onnx", "int8"),
        ExportTarget("onnxruntime"),
        ExportTarget("openvino", "int8"),
    ):
        verifier.export(target)
    assert [each["target"] for each in verifier.proven] == ["onnx", "onnxruntime"]
    first, second = verifier.rejected
    assert "has other outputs than in training" in first["reason"]
    assert second["reason"] == "it is made from onnx-int8, which was rejected"
    assert not (verifier.folder / "onnx-int8").exists()
    rejected = verifier.folder / first["where"]
    assert (rejected / "reason.txt").read_text() == first["reason"] + "\n"
    assert (rejected / ONNX_FILE).is_file(), "it can't be looked at"
    assert (verifier.folder / second["where"] / "reason.txt").is_file()


@pytest.mark.slow
def test_losing_one_text_in_four_hundred_is_rejected(verifier):
    verifier.export(ExportTarget("onnx"))
    verifier.export(ExportTarget("onnx", "int8"))
    assert [each["target"] for each in verifier.proven] == ["onnx", "onnx-int8"]
    assert verifier.proven[1]["score"] == verifier.proven[1]["trained_score"] == 1
    shutil.rmtree(verifier.folder / "onnx-int8")
    verifier.proven.clear()
    row = verifier.quantized_logits[0]
    row[:] = np.roll(row, 1)  # as if one text had got another prediction
    verifier.export(ExportTarget("onnx", "int8"))
    assert not verifier.proven
    assert "its accuracy on 400 texts is 100.00%, expected 99.75% as trained" in verifier.rejected[0]["reason"]


def test_corrected_labels_change_the_hash_of_the_texts():
    right, wrong = Examples(["a", "b"], None, [0, 1]), Examples(["a", "b"], None, [1, 1])
    assert hash_texts(right) != hash_texts(wrong)
    assert hash_texts(right) == hash_texts(Examples(["a", "b"], None, [0, 1]))


def test_a_teacher_missing_for_a_runtime_leaves_that_speedup_empty():
    keys = [("teacher", "pytorch", "fp32"), ("student", "pytorch", "fp32"), ("student", "openvino", "fp32")]
    faster = {"value": 2.0, "low": 1.9, "high": 2.1}
    measured = Measured({key: {"best_ms": 4.0 if key == keys[0] else 2.0} for key in keys}, {keys[1]: faster})
    speedups = [describe_speedup(key, measured) for key in keys]
    assert [each["vs_teacher_same_runtime"] for each in speedups] == [1.0, 2.0, None]
    assert speedups[1]["same_runtime"] == faster
    assert [each["vs_teacher_pytorch"] for each in speedups] == [1.0, 2.0, 2.0]
    assert describe_speedup(keys[1], Measured({keys[1]: {"best_ms": 2.0}}, {})) is None
    entries = [dict(zip(("name", "runtime", "precision"), key, strict=True)) for key in keys]
    compare_with_teacher(entries, dict.fromkeys(keys, np.asarray([1, 2])))
    assert entries[2]["agreement_with_teacher"] == 1
