"""A model that answers questions through the whole road: told by the columns, taught by cached starts and ends."""

import json

import pytest
from transformers import AutoModelForQuestionAnswering

from commands import finish, small_run
from task_data import question_data


@pytest.fixture
def questions(tmp_path):
    return question_data(tmp_path / "questions")


@pytest.mark.slow
def test_answers_are_not_taught_exported_or_scored(body_folder, questions, tmp_path):
    output = tmp_path / "run"
    more = ("--teacher_train.epochs", "12", "--epochs", "8", "--teacher_train.dropout", "0", "--train.dropout", "0")
    said = finish("distill", small_run(body_folder, questions, output, *more))
    assert "task: question-answering (columns question, context and answers)" in said
    report = json.loads((output / "report.json").read_text())
    assert report["metric"] == "F1"
    found = {(each["name"], each["runtime"]): each for each in report["models"]}
    for who in ("teacher", "student"):
        torch, onnx = found[who, "pytorch"], found[who, "onnxruntime"]
        assert torch["scores"] == pytest.approx(onnx["scores"])
        assert onnx["scores"]["F1"] >= onnx["scores"]["exact match"]
    assert found["teacher", "pytorch"]["score"] > 0.3  # one word in nine by chance
    assert found["student", "pytorch"]["score"] > 0.2
    cache = json.loads(next((output / "cache").glob("*/cache/cache.json")).read_text())
    assert cache["made_from"]["task"] == "question-answering"
    assert AutoModelForQuestionAnswering.from_pretrained(output / "student").config.num_hidden_layers == 2
