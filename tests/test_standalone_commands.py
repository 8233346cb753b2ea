"""Commands that take any checkpoint, without a run that made it."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from commands import finish
from conftest import build_model, saved

QUICK = ["--measure.texts", "4", "--measure.rounds", "1", "--measure.batch", "4", "--measure.parity", "8"]


@pytest.fixture
def base(headed_folder: Path, data_folder: Path) -> list[str]:
    return ["--model", str(headed_folder), "--data", str(data_folder)]


def test_a_checkpoint_is_not_evaluated_alone(base, tmp_path):
    said = finish("evaluate", [*base, *QUICK, "--output", str(tmp_path / "e")])
    assert "student" not in said.split("Evaluation")[1]


def test_a_checkpoint_is_not_exported_alone(base, tmp_path):
    said = finish("export", [*base, "--output", str(tmp_path / "x"), "--export", "onnx", "--parity", "8"])
    assert list((tmp_path / "x").rglob("model.onnx"))
    assert "of logits" in said


@pytest.mark.slow
def test_a_report_beside_a_teacher_has_one_model(base, tokenizer: PreTrainedTokenizerBase, tmp_path):
    teacher = saved(build_model("bert", num_hidden_layers=2), tokenizer, tmp_path / "teacher")
    finish("report", [*base, *QUICK, "--teacher", str(teacher), "--output", str(tmp_path / "r")])
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert {m["name"] for m in report["models"]} == {"teacher", "student"}
