"""Augmentation as a stage of `python -m pipelines.distill`: its rows, its record, and what is rejected."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines import distill
from support.commands import rejection_of, run_to_success, small_run
from support.reports import report_of
from support.run_inputs import make_inputs, stage_folder

KINDS = "swap,delete,keyboard=0.3,ngrams,templates"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def augmented_run(inputs, tmp_path_factory) -> tuple[Path, list[str], str]:
    """The output of a run up to its student, its arguments, and what it printed."""
    output = tmp_path_factory.mktemp("augmented") / "run"
    more = ("--data.augment", KINDS, "--augment.times", "3", "--augment.agreement", "0.5", "--augment.ratio", "1")
    arguments = small_run(*inputs, output, *more, "--epochs", "2", "--export", "onnx")
    return output, arguments, run_to_success("distill", [*arguments, "--until", "distill"])


def read_splits(output: Path, stage: str) -> dict[str, list]:
    folder = stage_folder(output, stage)
    return {file.stem: pq.read_table(file).to_pylist() for file in folder.glob("*.parquet")}


def test_synthetic_rows_are_unlabelled_texts_and_everything_else_stays(augmented_run):
    output, _, message = augmented_run
    before, after = read_splits(output, "data"), read_splits(output, "augment")
    record = [json.loads(line) for line in (stage_folder(output, "augment") / "augment.jsonl").read_text().splitlines()]
    assert [row["text"] for row in after["unlabelled"]] == [row["text"] for row in record]
    assert {name: after[name] for name in ("train", "validation", "test")} == {
        name: before[name] for name in ("train", "validation", "test")
    }
    assert 0 < len(record) <= 3 * len(before["train"])
    assert {row["kind"] for row in record} >= {"swap", "delete", "keyboard", "ngrams"}
    assert "augment: classes: the largest change" in message
    assert "because the teacher's answer differs" in message


@pytest.mark.slow
def test_the_report_counts_the_synthetic_rows(augmented_run):
    output, arguments, _ = augmented_run
    run_to_success("distill", arguments)
    record = (stage_folder(output, "augment") / "augment.jsonl").read_text().splitlines()
    data = report_of(output)["data"]
    assert data["augment_rows"] == data["unlabelled"] == len(record)
    assert any(remark.startswith("augment: classes: the largest change") for remark in data["remarks"])


def test_the_student_sees_the_share_of_synthetic_rows_in_each_epoch(augmented_run):
    output, _, message = augmented_run
    rows = len(read_splits(output, "data")["train"])
    manifest = json.loads((stage_folder(output, "augment") / "manifest.json").read_text())
    assert manifest["metrics"]["augment_epoch_rows"] == rows
    assert f"{4 * rows}/{4 * rows}" in message.replace(",", "") or f"{4 * rows:,}" in message


@pytest.mark.slow
def test_a_finished_stage_is_skipped_and_other_settings_make_a_new_one(augmented_run):
    output, arguments, _ = augmented_run
    assert "augment: already complete, skipped" in run_to_success("distill", [*arguments, "--until", "cache"])
    run_to_success("distill", [*arguments, "--until", "cache", "--augment.times", "2"])
    assert len(list((output / "augment").iterdir())) == 2


@pytest.mark.slow
def test_a_dry_run_lists_the_stage_and_predicts_it(inputs, tmp_path):
    arguments = small_run(*inputs, tmp_path / "run", "--data.augment", "swap", "--augment.times", "2", "--dry-run")
    message = run_to_success("distill", [*arguments, "--until", "cache"])
    assert "augment" in message
    message = run_to_success("distill", [*arguments, "--until", "cache", "--predict", "false"])
    assert "augment" in message


def test_rows_with_the_labels_of_their_originals_train_a_student_without_a_teacher(inputs, tmp_path):
    more = ("--data.augment", "swap", "--augment.times", "1", "--augment.labels", "row", "--epochs", "1")
    arguments = small_run(*inputs, tmp_path / "run", *more, "--loss.kl", "0", "--loss.ce", "1", "--until", "distill")
    run_to_success("distill", arguments)
    before, after = read_splits(tmp_path / "run", "data")["train"], read_splits(tmp_path / "run", "augment")["train"]
    assert after[: len(before)] == before
    lines = (stage_folder(tmp_path / "run", "augment") / "augment.jsonl").read_text().splitlines()
    assert [row["label"] for row in after[len(before) :]] == [
        before[json.loads(line)["row"]]["label"] for line in lines
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--data.augment", "swop"), "data.augment: expected kinds among rules"),
        (
            ("--data.augment", "swap", "--task", "masked-lm"),
            "found masked-lm: a language model would learn the changes",
        ),
        (("--data.augment", "ngrams", "--task", "question-answering"), "a context that is drawn has no answer"),
        (("--data.augment", "masked"), "data.augment masked: expected a masked language model in augment.model"),
        (("--data.augment", "swap", "--loss.kl", "0", "--loss.ce", "1"), "set augment.labels to row"),
        (("--data.augment", "synonyms", "--augment.lexicon", "/nowhere"), "augment.lexicon: expected a file"),
        (("--sampling.by", "balanced", "--task", "regression"), "sampling.by balanced: expected text-classification"),
        (("--sampling.by", "distance", "--teacher.online", "true"), "the teacher's answers are read from the cache"),
        (("--sampling.by", "length", "--train.batch_tokens", "64"), "expected batches of rows"),
        (
            ("--sampling.by", "length", "--data.augment", "swap", "--augment.ratio", "1"),
            "expected augment.ratio 0, found 1",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_rejected_before_any_stage(
    more, message, inputs, tmp_path, monkeypatch, capsys
):
    assert message in rejection_of(distill, small_run(*inputs, tmp_path / "run", *more), monkeypatch, capsys)
    assert not (tmp_path / "run").exists()


def test_files_that_do_not_fit_the_data_are_rejected_before_any_stage(inputs, tmp_path, monkeypatch, capsys):
    (tmp_path / "lexicon.tsv").write_text("Karte\tAusweis\n")
    more = ("--data.augment", "synonyms", "--augment.lexicon", str(tmp_path / "lexicon.tsv"))
    message = rejection_of(distill, small_run(*inputs, tmp_path / "run", *more), monkeypatch, capsys)
    assert "expected words of the data's language, found 0 of" in message
    assert not (tmp_path / "run" / "data").exists()


@pytest.mark.parametrize(
    "sampling",
    [
        ("distance", "--sampling.unbiased"),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (("balanced",), ("length",), ("difficulty", "--sampling.start", "0.5"))
        ),
    ],
)
def test_a_student_trains_on_the_rows_that_sampling_draws(sampling, inputs, tmp_path):
    by, *more = sampling
    more = [*more, "true"] if more == ["--sampling.unbiased"] else more
    shared = tmp_path / "run"
    arguments = small_run(*inputs, shared, "--epochs", "2", "--until", "distill")
    run_to_success("distill", [*arguments, "--sampling.by", by, *more])
    manifest = json.loads((stage_folder(shared, "distill") / "manifest.json").read_text())
    assert manifest["config"]["sampling"]["by"] == by
