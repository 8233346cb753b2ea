"""The pipeline on sentence pairs, with unlabelled text and a student loaded from a separate checkpoint."""

import csv
import random
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from support.commands import run_to_success, small_run
from support.reports import report_of
from support.tiny_models import build_model, make_rows, saved


def write(file: Path, header: list[str], rows: list[tuple]) -> None:
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([header, *rows])


def make_pairs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """Returns rows of (first text, second text, whether both are of one class)."""
    rows, chance = make_rows(2 * count, seed), random.Random(seed)
    drawn = []
    for _ in range(count):
        (a, left), (b, right) = chance.sample(rows, 2)
        drawn.append((a, b, int(left == right)))
    return drawn


@pytest.mark.slow
def test_a_checkpoint_student_is_distilled_on_pairs_with_unlabelled_text(tmp_path, tokenizer):
    data = tmp_path / "data"
    data.mkdir()
    header = ["premise", "hypothesis", "label"]
    write(data / "train.csv", header, make_pairs(80, 1))
    write(data / "dev.csv", header, make_pairs(20, 2))
    write(data / "test.csv", header, make_pairs(30, 3))
    more = tmp_path / "more.csv"
    write(more, header[:2], [row[:2] for row in make_pairs(40, 4)])
    teacher = saved(build_model("bert", "Model"), tokenizer, tmp_path / "teacher")
    student = saved(build_model("bert", "Model", num_hidden_layers=1), tokenizer, tmp_path / "small")
    arguments = small_run(teacher, data, tmp_path / "run", "--data.unlabelled", str(more), "--student", str(student))
    run_to_success("distill", [*arguments, "--epochs", "2", "--teacher_train.epochs", "2"])

    report = report_of(tmp_path / "run")
    counts = {name: report["data"][name] for name in ("train", "validation", "test", "unlabelled", "classes")}
    assert counts == {"train": 80, "validation": 20, "test": 30, "unlabelled": 40, "classes": 2}
    cache = next(stage for stage in report["stages"] if stage["name"] == "cache")
    assert cache["metrics"]["samples"] > 80  # unlabelled texts are cached too
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "student")
    assert loaded.config.num_hidden_layers == 1
    assert loaded.config.id2label == {0: "0", 1: "1"}
