"""The complete pipeline for sentence encoders: task selection by pairs, training on vectors, export with pooling."""

import csv

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from distill.checkpoint.sentence_folder import is_sentence_folder
from distill.checkpoint.sentence_form import SentenceForm
from distill.models.sentence_encoder import PooledModel
from pipelines import distill
from support.commands import rejection_of, run_to_success, small_run
from support.reports import report_of
from support.task_data import pair_data
from support.tiny_models import FILLERS, build_model, saved


@pytest.fixture
def pairs(tmp_path):
    return pair_data(tmp_path / "pairs")


@pytest.fixture
def encoder(tmp_path, tokenizer):
    model = PooledModel.from_pretrained(saved(build_model("bert", "Model"), tokenizer, tmp_path / "body"))
    model.form = SentenceForm(normalize=True, max_length=6)  # texts have seven tokens
    folder = tmp_path / "encoder"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_sentence_encoder_is_trained_exported_and_scored(tokenizer, encoder, pairs, tmp_path):
    output = tmp_path / "run"
    message = run_to_success("distill", small_run(encoder, pairs, output, "--epochs", "40", "--learning-rate", "3e-3"))
    assert "task: sentence-embedding (pairs of texts with a number; texts are cut at 6 tokens, not 32: the" in message
    report = report_of(output)
    scores = {(each["name"], each["runtime"]): each["scores"] for each in report["models"]}
    assert scores.keys() == {(who, where) for who in ("teacher", "student") for where in ("pytorch", "onnxruntime")}
    for where in ("pytorch", "onnxruntime"):
        assert scores["student", where]["Spearman"] > 0.1
        assert scores["teacher", where]["Spearman"] > 0.1  # its weights are random, but its word vectors differ
    assert is_sentence_folder(output / "student")
    student, teacher = (PooledModel.from_pretrained(folder) for folder in (output / "student", encoder))
    assert student.form == teacher.form
    arguments = tokenizer(FILLERS[:20], return_tensors="pt")
    with torch.no_grad():
        near = torch.cosine_similarity(student(**arguments).logits, teacher(**arguments).logits)
    assert near.mean() > 0.8
    sentence_transformers = pytest.importorskip("sentence_transformers")
    vectors = sentence_transformers.SentenceTransformer(str(output / "student"), device="cpu").encode(FILLERS[:4])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    with (pairs / "test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name, folder in (("teacher", encoder), ("student", output / "student")):
        encode = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode
        first, second = (encode([row[side] for row in rows]) for side in ("sentence1", "sentence2"))
        ranks = spearmanr((first * second).sum(1).round(5), [float(row["score"]) for row in rows]).statistic
        assert scores[name, "pytorch"]["Spearman"] == pytest.approx(ranks, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loss.ce", "1"), "expected loss.embedding or loss.similarity"),
        (("--teacher.finetune", "always"), "which has no labels"),
        (("--teacher.additional", '["other"]'), "expected text-classification with one class per text"),
    ],
)
def test_invalid_settings_for_sentence_embedding_are_rejected(
    arguments, message, encoder, pairs, tmp_path, monkeypatch, capsys
):
    arguments = small_run(encoder, pairs, tmp_path / "run", *arguments)
    assert message in rejection_of(distill, arguments, monkeypatch, capsys)


@pytest.mark.slow
def test_a_student_for_shorter_texts_finds_its_texts_in_the_teachers_cache(tokenizer, encoder, pairs, tmp_path):
    model = PooledModel.from_pretrained(encoder)
    model.form = SentenceForm(normalize=True, max_length=4)
    model.save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    arguments = small_run(encoder, pairs, tmp_path / "run", "--epochs", "1", "--until", "distill")
    run_to_success("distill", [*arguments, "--student", str(tmp_path / "short")])


def test_a_length_beyond_the_positions_is_accepted_if_the_encoder_truncates_earlier(encoder, pairs, tmp_path, capsys):
    arguments = small_run(
        encoder, pairs, tmp_path / "run", "--data.max_length", "300", "--dry-run", "--predict", "false"
    )
    distill.main(arguments)  # the model has 64 positions, and its folder limits texts to 6 tokens
    assert "nothing was written" in capsys.readouterr().out
