"""`--quantize` on a tiny student: what is deployed computes what was trained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from commands import finish, refused, small_run
from compress.export.onnx import FILE, OnnxModel
from compress.export.parity import layer_differences
from compress.export.rounded import round_graph
from compress.export.rows import layers_of
from compress.quantize.prepare import restore
from compress.quantize.store import load_rounding
from conftest import make_rows
from pipelines import distill
from test_distill_command import make_inputs, stage_folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(output, what it said) of a run whose student was trained in 8 bits with static ranges."""
    place = tmp_path_factory.mktemp("quantize")
    teacher, data = make_inputs(place)
    words = small_run(teacher, data, place / "run", "--epochs", "20", "--teacher_train.epochs", "20")
    return place / "run", finish("distill", [*words, "--quantize", "int8", "--quantize.samples", "32"])


def test_the_deployed_student_is_not_the_one_that_was_trained(finished):
    output, _ = finished
    made = stage_folder(output, "quantize") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(made).eval()
    rounding = load_rounding(made)
    layers = layers_of(model, rounding)
    assert {rounded.scheme.name for rounded in rounding.values() if rounded.scheme is not None} == {"int8-static"}
    tokenizer = AutoTokenizer.from_pretrained(made)
    given = tokenizer([text for text, _ in make_rows(40, 2)], padding=True, return_tensors="np")
    batch = {name: value.astype(np.int64) for name, value in given.items()}
    restore(model, rounding)
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in batch.items()}).logits.numpy()
    assert len(set(expected.argmax(-1))) > 2, "it tells classes apart"
    for target in ("onnx-int8", "onnxruntime-int8"):
        found = OnnxModel(output / "student" / target, 1)(batch)
        assert (found.argmax(-1) == expected.argmax(-1)).all(), target
    # What is deployed is what the numbers beside the checkpoint make of its plain file.
    exported = next((output / "export").iterdir())
    again = round_graph(exported / "onnx" / FILE, output / "again" / FILE, layers)
    assert (output / "again" / FILE).read_bytes() == (output / "student" / "onnx-int8" / FILE).read_bytes()
    assert max(layer_differences(output / "again" / FILE, again.products, model, batch).values()) <= 1e-5


def test_the_report_has_no_int8_row(finished):
    output, said = finished
    entries = json.loads((output / "report.json").read_text())["models"]
    found = {(e["name"], e["runtime"], e["precision"]): e for e in entries}
    small, whole = found["student", "onnxruntime", "int8"], found["student", "onnxruntime", "fp32"]
    assert small["bytes"] < 0.7 * whole["bytes"]
    assert abs(small["score"] - whole["score"]) <= 0.1
    assert "layers round as int8-static" in said


def test_labels_alone_train_in_few_bits(tmp_path, monkeypatch, capsys):
    teacher, data = make_inputs(tmp_path)
    words = small_run(teacher, data, tmp_path / "run", "--quantize", "int8")
    said = refused(distill, [*words, "--loss.kl", "0", "--loss.ce", "1"], monkeypatch, capsys)
    assert "under the teacher's cached logits" in said
    said = refused(distill, [*words[:-1], "int3"], monkeypatch, capsys)
    assert "quantize.scheme: expected one of int8-static" in said
