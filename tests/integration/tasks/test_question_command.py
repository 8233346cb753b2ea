"""The complete pipeline for question answering: task selection by columns, training on cached starts and ends."""

import json

import pytest
import torch
from transformers import AutoModelForQuestionAnswering

from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.data_module import TextDataModule
from distill.data.config import DataConfig
from distill.tasks.question_answering import QuestionAnswering
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from pipelines.stages.train.general import attach_head
from support.commands import run_to_success, small_run
from support.reports import report_of
from support.task_data import question_data
from support.tiny_models import build_model, make_rows, saved


@pytest.fixture
def questions(tmp_path):
    return question_data(tmp_path / "questions")


@pytest.mark.slow
def test_a_question_answering_student_is_trained_exported_and_scored(body_folder, questions, tmp_path):
    output = tmp_path / "run"
    more = ("--teacher_train.epochs", "12", "--epochs", "8", "--teacher_train.dropout", "0", "--train.dropout", "0")
    message = run_to_success("distill", small_run(body_folder, questions, output, *more))
    assert "task: question-answering (columns question, context and answers)" in message
    report = report_of(output)
    assert report["metric"] == "F1"
    entries = {(each["name"], each["runtime"]): each for each in report["models"]}
    for who in ("teacher", "student"):
        stock, onnx = entries[who, "pytorch"], entries[who, "onnxruntime"]
        assert stock["scores"] == pytest.approx(onnx["scores"])
        assert onnx["scores"]["F1"] >= onnx["scores"]["exact match"]
    assert entries["teacher", "pytorch"]["score"] > 0.3  # chance level is one word in nine
    assert entries["student", "pytorch"]["score"] > 0.2
    cache = json.loads(next((output / "cache").glob("*/cache/cache.json")).read_text())
    assert cache["made_from"]["task"] == "question-answering"
    assert AutoModelForQuestionAnswering.from_pretrained(output / "student").config.num_hidden_layers == 2


def test_the_general_stages_body_gets_a_new_question_answering_head(questions, tokenizer, tmp_path):
    """The head is new, because there are no classes to fit it to; the body comes from the general stage."""
    body = build_model("bert", "Model")
    folder, task = saved(body, tokenizer, tmp_path / "body"), QuestionAnswering(())
    texts = TextDataModule(task.read(DataConfig(path=str(questions)), 0), load_tokenizer(folder), encode=task.encode)
    student = attach_head(Run(tmp_path / "run", 0, Console()), folder, task, texts)
    assert student.qa_outputs.out_features == 2
    assert all(each.requires_grad for each in student.parameters())
    expected = dict(body.named_parameters())
    for name, weight in student.bert.named_parameters():
        torch.testing.assert_close(weight, expected[name])


@pytest.mark.slow
def test_question_answering_follows_a_general_stage_on_plain_text(body_folder, questions, tmp_path):
    output, prose = tmp_path / "run", tmp_path / "prose.txt"
    prose.write_text(" ".join(text for text, _ in make_rows(60, 3)))
    arguments = small_run(body_folder, questions, output, "--general.data", str(prose), "--general.length", "16")
    arguments[arguments.index("layers=2")] = "mobilebert"
    arguments += ["--general.loss.relations", "1", "--general.loss.relation_heads", "4"]
    arguments += ["--general.progressive_share", "0.5"]
    run_to_success("distill", [*arguments, "--epochs", "1", "--teacher_train.epochs", "1", "--until", "distill"])
    (manifest,) = (output / "distill").glob("*/manifest.json")
    assert "general" in json.loads(manifest.read_text())["inputs"]
    student = AutoModelForQuestionAnswering.from_pretrained(manifest.parent / "model")
    assert type(student).__name__ == "MobileBertForQuestionAnswering"
