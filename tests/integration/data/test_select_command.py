"""Selection as a stage of `python -m pipelines.distill`: which rows are left, its record, and what is rejected."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipelines import distill
from support.commands import rejection_of, run_to_success, small_run
from support.reports import report_of
from support.run_inputs import make_inputs, stage_folder, write_csv
from support.tiny_models import make_rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    teacher, data = make_inputs(tmp_path_factory.mktemp("inputs"))
    write_csv(data.parent / "pool.csv", make_rows(60, 5))
    return teacher, data


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """The output of all runs, so that the teacher is trained once."""
    return tmp_path_factory.mktemp("selected") / "run"


def read_train(folder: Path, split: str = "train") -> list[dict]:
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def newest_selection(output: Path) -> Path:
    return max((output / "select").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)


@pytest.mark.parametrize(
    "more",
    [
        ("balanced",),
        pytest.param(("margin", "--select.prefer", "easy"), marks=pytest.mark.slow),
        pytest.param(("random",), marks=pytest.mark.slow),
        pytest.param(("entropy",), marks=pytest.mark.slow),
        pytest.param(("loss",), marks=pytest.mark.slow),
        pytest.param(("ccs",), marks=pytest.mark.slow),
        pytest.param(("k-centre",), marks=pytest.mark.slow),
        pytest.param(("facility", "--select.vectors", "embeddings"), marks=pytest.mark.slow),
        pytest.param(("mixture",), marks=pytest.mark.slow),
        pytest.param(("el2n",), marks=pytest.mark.slow),
        pytest.param(("forgetting",), marks=pytest.mark.slow),
        pytest.param(("aum",), marks=pytest.mark.slow),
    ],
)
def test_a_share_of_the_rows_is_kept_with_every_class(more, inputs, output):
    selection = ("--data.select", *more, "--select.share", "0.25", "--until", "cache", "--teacher_train.epochs", "2")
    message = run_to_success("distill", small_run(*inputs, output, *selection))
    folder, rows = newest_selection(output), read_train(stage_folder(output, "data"))
    chosen = json.loads((folder / "selected.json").read_text())["train"]
    assert read_train(folder) == [rows[row] for row in chosen]
    assert len(chosen) == round(0.25 * len(rows))
    assert {row["label"] for row in read_train(folder)} == set(range(5))
    assert f"select: {len(chosen)} of {len(rows)} rows of train by {more[0]}" in message


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_teacher_predicts_for_augmentation_and_selection_on_a_gpu(inputs, tmp_path):
    more = ("--data.augment", "order", "--augment.times", "1", "--augment.agreement", "0.1", "--accelerator", "gpu")
    for method in ("margin", "k-centre"):
        selection = ("--data.select", method, "--select.share", "0.25", "--until", "cache")
        run_to_success("distill", small_run(*inputs, tmp_path / "run", *more, *selection))
        rows = read_train(stage_folder(tmp_path / "run", "data"))
        assert len(read_train(newest_selection(tmp_path / "run"))) == round(0.25 * len(rows))


@pytest.mark.slow
def test_the_students_loss_follows_the_share_and_the_cache_has_the_chosen_rows(inputs, tmp_path):
    more = ("--data.select", "balanced", "--select.rows", "27", "--loss.ce", "0.5", "--loss.kl", "0.5", "--epochs", "1")
    message = run_to_success("distill", small_run(*inputs, tmp_path / "run", *more))
    assert "select: loss weights adjusted to the share of rows: kl 0.8" in message
    report = report_of(tmp_path / "run")
    share = report["data"]["select_share"]
    assert report["data"]["select_kept"] == report["data"]["train"] == 27
    loss = json.loads((stage_folder(tmp_path / "run", "distill") / "manifest.json").read_text())["config"]["loss"]
    assert loss["ce"] == pytest.approx(0.5 * share)
    assert loss["kl"] == pytest.approx(1 - 0.5 * share)
    cache = json.loads((stage_folder(tmp_path / "run", "cache") / "manifest.json").read_text())
    assert cache["metrics"]["samples"] <= 27


@pytest.mark.slow
def test_texts_of_a_pool_are_chosen_by_their_similarity_to_a_target(inputs, tmp_path):
    teacher, data = inputs
    pool = data.parent / "pool.csv"
    wanted = make_rows(60, 5)[7][0]
    (tmp_path / "target.txt").write_text(wanted + "\n")
    more = ("--data.unlabelled", str(pool), "--data.select", "similarity", "--select.rows", "5", "--until", "cache")
    more = (*more, "--select.source", "unlabelled", "--select.target", str(tmp_path / "target.txt"))
    run_to_success("distill", small_run(teacher, data, tmp_path / "run", *more))
    folder = newest_selection(tmp_path / "run")
    chosen = json.loads((folder / "selected.json").read_text())["unlabelled"]
    texts = [row["text"] for row in read_train(folder, "unlabelled")]
    assert len(chosen) == len(texts) == 5
    assert wanted in texts
    assert len(read_train(folder)) == len(read_train(stage_folder(tmp_path / "run", "data")))


def test_texts_of_a_pool_are_balanced_by_the_teachers_predictions(inputs, tmp_path):
    more = ("--data.unlabelled", str(inputs[1].parent / "pool.csv"), "--data.select", "balanced", "--select.rows", "5")
    run_to_success(
        "distill", small_run(*inputs, tmp_path / "run", *more, "--select.source", "unlabelled", "--until", "cache")
    )
    folder = newest_selection(tmp_path / "run")
    texts = [row["text"] for row in read_train(folder, "unlabelled")]
    teacher = stage_folder(tmp_path / "run", "teacher") / "model"
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    pool = [row["text"] for row in read_train(stage_folder(tmp_path / "run", "data"), "unlabelled")]
    with torch.no_grad():
        classes = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in pool]
    class_of_text = dict(zip(pool, classes, strict=True))
    counts = Counter(class_of_text[text] for text in texts)
    assert sum(counts.values()) == 5
    rare = min(Counter(classes).values())
    assert all(counts[name] >= min(rare, 5 // len(set(classes))) for name in set(classes))


@pytest.mark.slow
def test_recording_the_teachers_training_does_not_change_it(inputs, tmp_path):
    from safetensors.torch import load_file

    plain = small_run(*inputs, tmp_path / "plain", "--until", "teacher", "--teacher_train.epochs", "2")
    run_to_success("distill", plain)
    recorded = [str(tmp_path / "recorded") if word == str(tmp_path / "plain") else word for word in plain]
    run_to_success("distill", [*recorded, "--data.select", "aum", "--select.share", "0.5"])
    weights = [
        load_file(stage_folder(tmp_path / name, "teacher") / "model" / "model.safetensors")
        for name in ("plain", "recorded")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    logits = torch.load(stage_folder(tmp_path / "recorded", "teacher") / "dynamics.pt")
    assert logits.shape == (2, len(read_train(stage_folder(tmp_path / "plain", "data"))), 5)


@pytest.mark.slow
def test_a_dry_run_predicts_the_stages_after_a_small_selection(inputs, tmp_path):
    more = ("--data.select", "k-centre", "--select.rows", "6", "--until", "distill", "--dry-run", "--epochs", "3")
    message = run_to_success("distill", small_run(*inputs, tmp_path / "run", *more))
    predicted = message[message.index("Predicted") :]
    assert "select" in predicted
    assert "distill" in predicted
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--data.select", "randon", "--select.share", "0.5"), "select.method"),
        (("--data.select", "random"), "expected either select.share above 0 and below 1 or select.rows"),
        (("--data.select", "aum", "--select.share", "0.5", "--task", "regression"), "expected text-classification"),
        (("--data.select", "entropy", "--select.share", "0.5", "--task", "masked-lm"), "expected random for masked-lm"),
        (
            ("--data.select", "similarity", "--select.rows", "5", "--select.target", "/nowhere"),
            "found none at '/nowhere'",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_rejected_before_any_stage(
    more, message, inputs, tmp_path, monkeypatch, capsys
):
    assert message in rejection_of(distill, small_run(*inputs, tmp_path / "run", *more), monkeypatch, capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--data.select", "random", "--select.rows", "4"), "expected at least a row for each of 5 classes, found 4"),
        (("--data.select", "random", "--select.share", "0.01"), "expected at least a row for each of 5 classes"),
        (("--data.select", "random", "--select.rows", "5000"), "expected to keep at least 1 and fewer than"),
    ],
)
def test_a_share_that_leaves_a_class_empty_is_rejected_before_any_stage(
    more, message, inputs, tmp_path, monkeypatch, capsys
):
    assert message in rejection_of(distill, small_run(*inputs, tmp_path / "run", *more), monkeypatch, capsys)
    assert not (tmp_path / "run" / "data").exists()
