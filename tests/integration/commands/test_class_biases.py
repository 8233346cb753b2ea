"""Runs with biases of the classes that are fitted to the validation split: what changes, and what is rejected."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from compress.quantize.store import QUANTIZATION_FILE
from distill.checkpoint.custom_models import load_model_folder
from pipelines import distill
from support.commands import rejection_of, run_to_success, small_run
from support.run_inputs import make_inputs, stage_folder
from support.task_data import tagged_data

FITTED = ("--fit_class_biases", "true")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("biases"))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model_folder(folder).state_dict()


def read_metrics(output: Path, stage: str) -> dict[str, object]:
    return json.loads((stage_folder(output, stage) / "manifest.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def fitted_run(inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """The folder of a finished run with fitted biases, its other arguments, and what it printed."""
    output = tmp_path_factory.mktemp("fitted") / "run"
    arguments = small_run(*inputs, output, "--export", "onnx", "--epochs", "2", "--teacher_train.epochs", "2")
    return output, arguments, run_to_success("distill", [*arguments, *FITTED])


def test_student_and_teacher_are_exported_with_fitted_biases(fitted_run):
    output, _, printed = fitted_run
    assert "biases-teacher: validation" in printed
    for stage, fitted in (("teacher", "biases-teacher"), ("distill", "biases")):
        before, after = (read_weights(stage_folder(output, name) / "model") for name in (stage, fitted))
        (changed,) = (name for name in before if not torch.equal(before[name], after[name]))
        assert changed == "classifier.bias"
        metrics = read_metrics(output, fitted)
        torch.testing.assert_close(after[changed], before[changed] + torch.tensor(metrics["biases"]))
        assert metrics["val/score_before"] == pytest.approx(read_metrics(output, stage)["val/score"])
        assert 0 <= metrics["val/score"] <= 1
    delivered, fitted = read_weights(output / "student"), read_weights(stage_folder(output, "biases") / "model")
    assert all(torch.equal(delivered[name], fitted[name]) for name in fitted)
    assert "fitted to the validation split" in (output / "report.html").read_text()


@pytest.mark.slow
def test_the_same_run_without_biases_delivers_the_trained_student(fitted_run):
    output, arguments, _ = fitted_run
    again = run_to_success("distill", arguments)
    assert "distill: already complete" in again
    assert "fitted to the validation split" not in (output / "report.html").read_text()
    plain = read_weights(stage_folder(output, "distill") / "model")
    assert torch.equal(read_weights(output / "student")["classifier.bias"], plain["classifier.bias"])


@pytest.mark.slow
def test_a_quantized_student_gets_biases_and_keeps_its_scales(inputs, tmp_path):
    arguments = small_run(*inputs, tmp_path / "run", *FITTED, "--quantize", "int8", "--quantize.samples", "32")
    assert "rejected" not in run_to_success("distill", arguments)
    quantized, fitted = (stage_folder(tmp_path / "run", name) / "model" for name in ("quantize", "biases"))
    assert (fitted / QUANTIZATION_FILE).read_bytes() == (quantized / QUANTIZATION_FILE).read_bytes()
    before, after = read_weights(quantized), read_weights(fitted)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["classifier.bias"]


@pytest.mark.slow
def test_students_without_attention_get_biases(inputs, tmp_path):
    printed = run_to_success("distill", small_run(*inputs, tmp_path / "run", *FITTED, "--student", "static"))
    assert "biases: validation" in printed
    assert "rejected" not in printed


@pytest.mark.slow
def test_a_student_that_is_already_trained_gets_biases(inputs, tmp_path):
    run_to_success("distill", small_run(*inputs, tmp_path / "first"))
    student, output = tmp_path / "first" / "student", tmp_path / "second"
    trained = ("--student", str(student), "--student.trained", "true")
    printed = run_to_success("distill", small_run(*inputs, output, *trained, *FITTED))
    assert "cache: started" not in printed, "nothing is trained on the teacher's logits"
    before, after = read_weights(student), read_weights(output / "student")
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["classifier.bias"]


@pytest.mark.slow
def test_tags_get_biases_that_fit_the_words(inputs, tmp_path):
    data = tagged_data(tmp_path / "tags")
    run_to_success("distill", small_run(inputs[0], data, tmp_path / "run", *FITTED, "--epochs", "8"))
    metrics = read_metrics(tmp_path / "run", "biases")
    config = json.loads((tmp_path / "run" / "student" / "config.json").read_text())
    assert len(metrics["biases"]) == len(config["id2label"])
    assert metrics["val/score_before"] == pytest.approx(read_metrics(tmp_path / "run", "distill")["val/score"])


@pytest.mark.slow
def test_tags_that_mark_no_spans_get_biases_too(inputs, tmp_path):
    data = tagged_data(tmp_path / "tags")
    for file in data.glob("*.parquet"):
        table = pq.read_table(file)
        tags = [[tag.removeprefix("B-") for tag in row] for row in table["tags"].to_pylist()]
        pq.write_table(table.set_column(1, "tags", pa.array(tags)), file)
    run_to_success("distill", small_run(inputs[0], data, tmp_path / "run", *FITTED))
    assert 0 <= read_metrics(tmp_path / "run", "biases")["val/score"] <= 1


def test_a_dry_run_lists_the_stages(inputs, tmp_path):
    printed = run_to_success(
        "distill", small_run(*inputs, tmp_path / "run", *FITTED, "--dry-run", "--predict", "false")
    )
    stages = [line.split("│")[1].strip() for line in printed.splitlines() if "will run" in line]
    assert stages[-6:] == ["biases-teacher", "export-teacher", "biases", "export", "evaluate", "report"]


def test_a_task_without_classes_is_rejected(inputs, tmp_path, monkeypatch, capsys):
    arguments = small_run(*inputs, tmp_path / "run", *FITTED, "--task", "regression")
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert "fit_class_biases: expected text-classification with one class per text, or token-classification" in message
    assert "found regression" in message


def test_a_nested_family_is_rejected(inputs, tmp_path, monkeypatch, capsys):
    nested = ("--nested", "true", "--speedup", "2,4", "--student", "teacher")
    message = rejection_of(distill, small_run(*inputs, tmp_path / "run", *FITTED, *nested), monkeypatch, capsys)
    assert "fit_class_biases: expected false with prune.nested" in message
