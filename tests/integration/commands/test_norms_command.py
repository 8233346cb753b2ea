"""Runs whose student has another normalization than its teacher: trained, quantized and exported."""

import json
from pathlib import Path

import pytest

from distill.checkpoint.custom_models import load_model_folder
from pipelines import distill, prune
from support.commands import rejection_of, run_to_success, small_run
from support.run_inputs import make_inputs, stage_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("norms"))


def test_batch_norms_are_trained_and_folded_into_the_deployed_files(inputs, tmp_path):
    arguments = small_run(*inputs, tmp_path / "run", "--student", "layers=2,norm=batchnorm")
    printed = run_to_success("distill", [*arguments, "--quantize", "int8", "--quantize.samples", "32"])
    assert "rejected" not in printed
    trained = load_model_folder(stage_folder(tmp_path / "run", "distill") / "model")
    assert set(trained.config.norms.values()) == {"batchnorm"}
    deployed = json.loads((tmp_path / "run" / "student" / "config.json").read_text())["norms"]
    assert "batchnorm" not in deployed.values()
    assert "identity" in deployed.values()


def test_float_files_are_folded_and_the_checkpoint_isnt(inputs, tmp_path):
    arguments = small_run(*inputs, tmp_path / "run", "--student", "layers=2,norm=nonorm", "--export", "onnx")
    assert "rejected" not in run_to_success("distill", arguments)
    folders = tmp_path / "run" / "student", tmp_path / "run" / "student" / "onnx"
    stored, file = (json.loads((folder / "config.json").read_text())["norms"] for folder in folders)
    assert set(stored.values()) == {"nonorm"}
    assert "identity" in file.values()


def test_two_processes_train_a_student_with_rms_norms(inputs, tmp_path):
    arguments = small_run(*inputs, tmp_path / "run", "--student", "layers=2,norm=rmsnorm", "--devices", "2")
    run_to_success("distill", [*arguments, "--until", "distill"])
    assert set(load_model_folder(stage_folder(tmp_path / "run", "distill") / "model").config.norms.values()) == {
        "rmsnorm"
    }


def test_two_processes_are_rejected_for_batch_norms(inputs, tmp_path, monkeypatch, capsys):
    arguments = small_run(*inputs, tmp_path / "run", "--student", "layers=2,norm=batchnorm", "--devices", "2")
    assert "norm=batchnorm: expected one process, found 2" in rejection_of(distill, arguments, monkeypatch, capsys)


def test_a_finished_student_with_other_norms_cannot_be_pruned(inputs, tmp_path, monkeypatch, capsys):
    arguments = small_run(*inputs, tmp_path / "run", "--student", "layers=2,norm=rmsnorm")
    run_to_success("distill", arguments)
    model, data = tmp_path / "run" / "student", inputs[1]
    options = ["--model", str(model), "--data", str(data), "--speedup", "2", "--output", str(tmp_path / "pruned")]
    assert "it can't be pruned" in rejection_of(prune, options, monkeypatch, capsys)
