"""Commands that accept any checkpoint without the run that created it."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from distill.checkpoint.checkpoint import open_checkpoint
from distill.checkpoint.sentence_form import SentenceForm
from pipelines import export
from pipelines.runs.console import Console
from pipelines.settings.commands.export import ExportConfig
from pipelines.stages.deliver.export import check_model, is_labelled, load_examples
from support.commands import QUICK_MEASUREMENT, rejection_of, run_to_success
from support.reports import report_of
from support.tiny_models import build_model, make_rows, saved
from unit.distill.checkpoint.test_sentence_folder import build as sentence_encoder


@pytest.fixture
def base(headed_folder: Path, data_folder: Path) -> list[str]:
    return ["--model", str(headed_folder), "--data", str(data_folder)]


@pytest.mark.slow
def test_a_single_checkpoint_is_evaluated(base, tmp_path):
    message = run_to_success("evaluate", [*base, *QUICK_MEASUREMENT, "--output", str(tmp_path / "e")])
    assert "student" not in message.split("Evaluation")[1]


def test_a_single_checkpoint_is_exported_and_scored(base, tmp_path):
    message = run_to_success(
        "export", [*base, "--output", str(tmp_path / "x"), "--export", "onnxruntime", "--parity", "8"]
    )
    assert list((tmp_path / "x").rglob("onnxruntime/model.onnx"))
    assert "of logits" in message
    entries = json.loads(next((tmp_path / "x").rglob("evaluation.json")).read_text())
    assert {e["runtime"] for e in entries} == {"pytorch", "onnxruntime"}
    assert all(0 <= e["score"] <= 1 and e["latency"]["best_ms"] > 0 for e in entries), "labels are there to score by"


def test_a_checkpoint_that_keeps_the_end_of_long_texts_is_exported_so(headed_folder, data_folder, tmp_path):
    """Its tokenizer.json says nothing of truncation: transformers writes that only after a call that truncates."""
    settings = json.loads((headed_folder / "tokenizer_config.json").read_text())
    (headed_folder / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": "left"}))
    stored = json.loads((headed_folder / "tokenizer.json").read_text())
    (headed_folder / "tokenizer.json").write_text(json.dumps(stored | {"truncation": None}))
    arguments = ["--model", str(headed_folder), "--data", str(data_folder), "--output", str(tmp_path / "x")]
    message = run_to_success("export", [*arguments, "--export", "onnxruntime", "--parity", "8", "--max_length", "4"])
    assert "rejected" not in message
    for file in (tmp_path / "x").rglob("onnxruntime/tokenizer.json"):
        assert json.loads(file.read_text())["truncation"]["direction"] == "Left"


def test_a_sentence_encoder_is_exported_with_its_own_limit_of_tokens(tokenizer, tmp_path):
    folder = saved(sentence_encoder("bert", SentenceForm("mean")), tokenizer, tmp_path / "encoder")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    config = ExportConfig(model=str(folder), data=str(tmp_path), output=str(tmp_path / "out"))
    assert check_model(config, open_checkpoint(str(folder), "model"), Console(quiet=True)) == 8


@pytest.mark.parametrize(
    ("head", "column", "expected"),
    [({"num_labels": 1}, "score", True), ({"num_labels": 1}, "label", True), ({}, "score", False)],
)
def test_data_is_labelled_by_the_columns_of_the_models_task(head, column, expected, tokenizer, tmp_path):
    model = saved(build_model("bert", **head), tokenizer, tmp_path / "model")
    texts = tmp_path / "texts.csv"
    texts.write_text(f"text,{column}\nwhere is my card,1.5\nthe parcel is late,2.5\n")
    config = ExportConfig(model=str(model), data=str(texts), output=str(tmp_path / "out"))
    assert is_labelled(config, open_checkpoint(str(model), "model")) == expected


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--parity", "0", "--parity: expected at least 1 text, found 0: no file could be verified"),
        ("--max_length", "-3", "--max_length: expected 0 or at least 4 tokens, found -3"),
    ],
)
def test_numbers_that_no_export_can_use_are_rejected(flag, value, message, base, tmp_path, monkeypatch, capsys):
    arguments = [*base, f"{flag}={value}", "--output", str(tmp_path / "x")]
    assert message in rejection_of(export, arguments, monkeypatch, capsys)


@pytest.mark.slow
def test_texts_without_labels_are_not_scored(headed_folder: Path, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": text}) for text, _ in make_rows(8, 0)))
    arguments = [
        "--model",
        str(headed_folder),
        "--data",
        str(texts),
        "--export",
        "onnx",
        "--output",
        str(tmp_path / "x"),
    ]
    assert "nothing was scored" in run_to_success("export", arguments)
    assert not list((tmp_path / "x").rglob("evaluation.json"))


def test_text_files_give_export_texts_for_a_language_model(tokenizer: PreTrainedTokenizerBase, tmp_path):
    model = saved(build_model("bert", "ForMaskedLM"), tokenizer, tmp_path / "model")
    books = tmp_path / "books"
    books.mkdir()
    for number in range(3):
        (books / f"{number}.txt").write_text("where is my card\n\nthe parcel is late")
    config = ExportConfig(model=str(model), data=str(books), output=str(tmp_path / "out"))
    assert len(load_examples(config, open_checkpoint(str(model), "model")).texts) >= 3


@pytest.mark.slow
def test_a_report_with_a_teacher_contains_both_models(base, tokenizer: PreTrainedTokenizerBase, tmp_path):
    teacher = saved(build_model("bert", num_hidden_layers=2), tokenizer, tmp_path / "teacher")
    run_to_success("report", [*base, *QUICK_MEASUREMENT, "--teacher", str(teacher), "--output", str(tmp_path / "r")])
    report = report_of(tmp_path / "r")
    assert {m["name"] for m in report["models"]} == {"teacher", "student"}
