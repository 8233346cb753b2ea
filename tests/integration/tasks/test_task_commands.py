"""Complete runs of other tasks than single-label classification: selection by the data, training, export, report."""

import csv
from copy import deepcopy
from typing import get_args

import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from distill.data.config import DataConfig
from distill.errors import InputError
from distill.tasks.choose import TASKS, choose_task
from pipelines import distill
from pipelines.reports.wording import WORDING
from pipelines.settings.commands.distill import TaskName
from support.commands import QUICK_MEASUREMENT, rejection_of, run_to_success, small_run
from support.reports import report_of
from support.task_data import TAGS, multi_label_data, regression_data, tagged_data
from support.tiny_models import WORDS, build_model, saved
from support.two_tokenizers import byte_level


@pytest.fixture
def tagged(tmp_path):
    return tagged_data(tmp_path / "tagged")


@pytest.mark.slow
def test_a_tagger_is_trained_exported_and_scored(body_folder, tagged, tmp_path):
    output = tmp_path / "run"
    more = ("--teacher_train.epochs", "30", "--epochs", "20", "--teacher_train.dropout", "0", "--train.dropout", "0")
    message = run_to_success("distill", small_run(body_folder, tagged, output, *more))
    assert "task: token-classification (columns tokens and tags contain lists)" in message
    report = report_of(output)
    assert (report["task"], report["metric"]) == ("token-classification", "span F1")
    assert report["baseline"]["name"] == "most frequent tag"
    assert report["baseline"]["scores"]["span F1"] == 0 < report["baseline"]["scores"]["accuracy"] < 1
    assert "most frequent tag" in message
    entries = {(e["name"], e["runtime"]): e for e in report["models"]}
    whole, small = entries["teacher", "onnxruntime"], entries["student", "onnxruntime"]
    assert whole["score"] > 0.5
    assert small["score"] > 0.3
    assert entries["student", "pytorch"]["scores"] == pytest.approx(small["scores"])
    assert 0.5 < small["agreement_with_teacher"] <= 1
    student = AutoModelForTokenClassification.from_pretrained(output / "student")
    assert list(student.config.id2label.values()) == TAGS
    assert "token-classification" in (output / "student" / "README.md").read_text()
    (log,) = (output / "distill").rglob("metrics.csv")
    with log.open() as file:
        curve = [row for row in csv.DictReader(file) if row["train/kl"]]
    assert float(curve[-1]["train/kl"]) < float(curve[0]["train/kl"])


@pytest.mark.slow
def test_a_single_tagger_checkpoint_is_evaluated_and_exported(tokenizer, tagged, tmp_path):
    names = {"id2label": dict(enumerate(TAGS)), "label2id": {name: i for i, name in enumerate(TAGS)}}
    model = saved(build_model("bert", "ForTokenClassification", **names), tokenizer, tmp_path / "tagger")
    arguments = ("--model", str(model), "--data", str(tagged))
    message = run_to_success(
        "evaluate", [*arguments, *QUICK_MEASUREMENT, "--data.max_length", "32", "--output", str(tmp_path / "alone")]
    )
    assert "task: token-classification (the teacher's head)" in message
    message = run_to_success("export", [*arguments, "--parity", "8", "--output", str(tmp_path / "exported")])
    assert "onnxruntime: reloaded in a fresh process" in message


@pytest.mark.slow
@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_multi_label_and_regression_students_are_scored_with_their_own_metric(task, body_folder, tmp_path):
    if task == "multi-label":
        data = multi_label_data(tmp_path / "data")
        metric, why = "micro F1", "column label contains lists"
    else:
        data = regression_data(tmp_path / "data")
        metric, why = "Spearman", "column label contains fractions"
    output = tmp_path / "run"
    more = ("--teacher_train.epochs", "12", "--epochs", "12", "--teacher_train.dropout", "0", "--train.dropout", "0")
    message = run_to_success("distill", small_run(body_folder, data, output, *more))
    assert f"task: {task} ({why})" in message
    report = report_of(output)
    assert report["metric"] == metric
    entries = {(e["name"], e["runtime"]): e for e in report["models"]}
    assert entries["teacher", "onnxruntime"]["score"] > 0.7
    assert entries["student", "onnxruntime"]["score"] > 0.4
    student = AutoModelForSequenceClassification.from_pretrained(output / "student")
    assert student.config.num_labels == (6 if task == "multi-label" else 1)
    wanted = {"multi-label": "multi_label_classification", "regression": "regression"}
    assert student.config.problem_type == wanted[task]
    assert report["task"] == task
    card = (output / "student" / "README.md").read_text()
    assert metric in card
    assert WORDING[task].model in card


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (
            ["--teacher.additional", '["other"]'],
            "teacher.additional: expected text-classification with one class",
        ),
        (["--task", "text-classification"], "no text column: expected one of text, sentence"),
    ],
)
def test_settings_that_the_task_does_not_support_are_rejected(
    more, named, body_folder, tagged, tmp_path, monkeypatch, capsys
):
    message = rejection_of(distill, small_run(body_folder, tagged, tmp_path / "run", *more), monkeypatch, capsys)
    assert named in message


def test_the_task_follows_the_teachers_head_and_other_heads_are_rejected(headed_folder, tokenizer, tagged, tmp_path):
    config = build_model("bert").config
    config.architectures = ["BertForSequenceClassification"]
    with pytest.raises(InputError, match="--task token-classification: the teacher 'x' was trained for text-class"):
        choose_task("token-classification", config, "x", DataConfig(path=str(tagged)))
    for problem, count, wanted in (
        (None, 5, "text-classification"),
        (None, 1, "regression"),
        ("multi_label_classification", 5, "multi-label"),
        ("regression", 1, "regression"),
    ):
        config.problem_type, config.num_labels = problem, count
        assert choose_task("auto", config, "x", DataConfig(path=str(tagged)))[0] == wanted
    config.architectures = ["BertForMultipleChoice"]
    with pytest.raises(InputError, match="found BertForMultipleChoice: it was trained for another task"):
        choose_task("auto", config, "x", DataConfig(path=str(tagged)))


def test_a_taggers_head_is_reused_with_its_labels_reordered(tokenizer, tagged, tmp_path):
    names = list(reversed(TAGS))
    model = build_model("bert", "ForTokenClassification", id2label=dict(enumerate(names)),
                        label2id={name: i for i, name in enumerate(names)})  # fmt: skip
    teacher = saved(model, tokenizer, tmp_path / "tagger")
    message = run_to_success("distill", small_run(teacher, tagged, tmp_path / "run", "--until", "teacher"))
    assert "its head has these 6 labels, in another order, matched by name" in message
    (checkpoint,) = (tmp_path / "run" / "teacher").glob("*/model")
    again = AutoModelForTokenClassification.from_pretrained(checkpoint)
    assert list(again.config.id2label.values()) == TAGS
    assert (again.classifier.weight == model.classifier.weight.flip(0)).all()


def test_every_task_can_be_requested_by_name():
    assert set(get_args(TaskName)) == {"auto", *TASKS}


@pytest.mark.slow
def test_a_byte_level_tagger_scores_the_same_in_pytorch_and_onnx_runtime(tagged, tmp_path):
    """The config has two token types, but the tokenizer outputs no token types."""
    tokenizer = deepcopy(byte_level(texts=(" ".join(WORDS),)))
    tokenizer.model_max_length = 16
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "type_vocab_size": 2}
    body = build_model("roberta", "Model", max_position_embeddings=17 + tokenizer.pad_token_id, **sizes)
    output = tmp_path / "run"
    run_to_success("distill", small_run(saved(body, tokenizer, tmp_path / "bytes"), tagged, output, "--epochs", "2"))
    entries = {(e["name"], e["runtime"]): e for e in report_of(output)["models"]}
    assert entries["student", "pytorch"]["scores"] == pytest.approx(entries["student", "onnxruntime"]["scores"])
