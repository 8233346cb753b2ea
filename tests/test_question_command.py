"""A model that answers questions through the whole road: told by the columns, taught by cached starts and ends."""

import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers import AutoModelForQuestionAnswering

from commands import finish, small_run
from conftest import CLUES, FILLERS

FIRST = [words[0] for words in CLUES.values()]


@pytest.fixture
def questions(tmp_path):
    """Contexts with one marked word; the answer is the word after it, the question names the mark."""
    rng, folder = random.Random(0), tmp_path / "questions"
    folder.mkdir()
    for split, count in (("train", 240), ("validation", 30), ("test", 40)):
        rows = []
        for _ in range(count):
            words, mark = rng.choices(FILLERS[:20], k=9), rng.choice(FIRST)
            place = rng.randrange(8)
            words[place] = mark
            start = len(" ".join(words[: place + 1])) + 1
            given = {"text": [words[place + 1]], "answer_start": [start]}
            rows.append({"question": mark, "context": " ".join(words), "answers": given})
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


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
