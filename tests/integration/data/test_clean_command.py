"""Cleaning as a stage of `python -m pipelines.distill`: its files, the student's folder, and what is rejected."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from distill.data.clean.deployment import PREPROCESSING, read_preprocessing
from distill.data.clean.person_names import NameFinder
from pipelines import distill
from support.commands import rejection_of, run_to_success, small_run
from support.reports import report_of
from support.run_inputs import make_inputs, stage_folder, write_csv
from support.tiny_models import LABELS, build_model, make_rows, saved

STEPS = "html,whitespace,duplicates,near-duplicates=0.9"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    """A teacher, and data in which rows 0 to 9 have tags, 10 to 19 are repeated, and 20 to 29 have wrong labels."""
    teacher, data = make_inputs(tmp_path_factory.mktemp("inputs"))
    rows = make_rows(120, 1)
    rows[:10] = [(f"<p>{text}</p>", label) for text, label in rows[:10]]
    rows[20:30] = [(text, shift_label(label)) for text, label in rows[20:30]]
    write_csv(data / "train.csv", [*rows, *((f"{text}!", label) for text, label in rows[10:20])])
    tests = make_rows(40, 2)
    write_csv(data / "test.csv", [(f"<b>{tests[0][0]}</b>", tests[0][1]), *tests[1:]])
    return teacher, data


@pytest.fixture(scope="module")
def cleaned_run(inputs, tmp_path_factory) -> tuple[Path, list[str], str]:
    """The output of a run up to its student, its arguments, and what it printed."""
    output = tmp_path_factory.mktemp("cleaned") / "run"
    arguments = small_run(*inputs, output, "--data.clean", STEPS, "--data.clean.deploy", "html", "--epochs", "1")
    return output, arguments, run_to_success("distill", [*arguments, "--until", "distill"])


@pytest.fixture(scope="module")
def reported_run(cleaned_run) -> Path:
    """The output of the same run with its exports and its report."""
    output, arguments, _ = cleaned_run
    run_to_success("distill", arguments)
    return output


def shift_label(label: str) -> str:
    return LABELS[(LABELS.index(label) + 1) % len(LABELS)]


def record_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (stage_folder(output, "clean") / "clean.jsonl").read_text().splitlines()]


def texts_of(folder: Path, split: str) -> list[str]:
    return pq.read_table(folder / f"{split}.parquet")["text"].to_pylist()


def test_later_stages_read_the_cleaned_data(cleaned_run):
    output, _, _ = cleaned_run
    folder = stage_folder(output, "clean")
    before, after = (texts_of(each, "train") for each in (stage_folder(output, "data"), folder))
    assert sum("<p>" in text for text in before) > 0
    assert not any("<" in text for text in after)
    assert len(after) < len(before)


def test_every_change_is_in_the_record(cleaned_run):
    output, _, message = cleaned_run
    rows = record_of(output)
    assert {row["why"].partition(":")[0] for row in rows} == {"html", "html, whitespace", "duplicates"}
    dropped = [row for row in rows if row["after"] is None]
    assert all(row["split"] == "train" for row in dropped)
    assert "clean: train, dropped by duplicates: " in message


def test_the_test_split_keeps_its_rows_and_labels(cleaned_run):
    output, _, _ = cleaned_run
    before, after = (pq.read_table(stage_folder(output, stage) / "test.parquet") for stage in ("data", "clean"))
    assert before["label"].equals(after["label"])
    changed = [row for row in range(40) if before["text"][row] != after["text"][row]]
    assert changed == [0], "only the step of deployment changes it"


@pytest.mark.slow
def test_the_report_and_the_students_folders_describe_the_cleaning(reported_run):
    data = report_of(reported_run)["data"]
    assert data["train"] == len(texts_of(stage_folder(reported_run, "clean"), "train"))
    assert data["clean_train_dropped_duplicates"] == sum(row["after"] is None for row in record_of(reported_run))
    assert any(remark.startswith("clean: train, changed by html: ") for remark in data["remarks"])
    for folder in (reported_run / "student", reported_run / "student" / "onnxruntime"):
        assert read_preprocessing(folder)("<b>bado</b>  bada") == "bado  bada"


@pytest.mark.slow
def test_a_finished_stage_is_skipped_and_other_steps_make_a_new_one(cleaned_run):
    output, arguments, _ = cleaned_run
    assert "clean: already complete, skipped" in run_to_success("distill", [*arguments, "--until", "teacher"])
    arguments[arguments.index(STEPS)] = "html,duplicates"
    run_to_success("distill", [*arguments, "--until", "teacher"])
    assert len(list((output / "clean").iterdir())) == 2
    arguments[arguments.index("html,duplicates")] = STEPS


def test_a_dry_run_lists_the_stage(inputs, tmp_path):
    arguments = small_run(*inputs, tmp_path / "run", "--data.clean", STEPS, "--dry-run", "--predict", "false")
    assert " clean " in run_to_success("distill", [*arguments, "--until", "teacher"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["report", "drop", "unlabel", "relabel"])
def test_wrong_labels_are_found_by_the_teachers_own_folds(inputs, tmp_path, how):
    data = shutil.copytree(inputs[1], tmp_path / "data")
    right = dict(make_rows(400, 1))
    stored = {text: shift_label(label) if row < 40 else label for row, (text, label) in enumerate(right.items())}
    write_csv(data / "train.csv", [*stored.items()])
    steps = (
        "--data.clean",
        f"html,labels={how}",
        "--teacher_train.epochs",
        "8",
        "--teacher_train.learning_rate",
        "3e-3",
    )
    run_to_success("distill", small_run(inputs[0], data, tmp_path / "run", *steps, "--until", "teacher"))
    rows = [row for row in record_of(tmp_path / "run") if row["why"].startswith("labels")]
    assert len(rows) >= 15
    assert sum(stored[row["before"]] != right[row["before"]] for row in rows) > 0.8 * len(rows)
    assert {row["after"] is None for row in rows} == {how == "drop"}
    before, after = (
        pq.read_table(stage_folder(tmp_path / "run", stage) / "train.parquet")["label"].to_pylist()
        for stage in ("data", "clean")
    )
    if how in {"drop", "unlabel"}:
        assert len(after) == len(before) - len(rows)
        unlabelled = texts_of(stage_folder(tmp_path / "run", "clean"), "unlabelled")
        assert unlabelled == ([row["after"] for row in rows] if how == "unlabel" else [])
    else:
        changed = sum(one != two for one, two in zip(before, after, strict=True))
        assert changed == (len(rows) if how == "relabel" else 0)


@pytest.mark.slow
def test_a_finished_fold_is_kept_when_the_stage_is_stopped(inputs, tmp_path, monkeypatch):
    from pipelines.stages.prepare import fold_logits

    arguments = small_run(*inputs, tmp_path / "run", "--data.clean", "labels", "--until", "teacher")
    trained = []
    train = fold_logits._train_fold

    def stop_after_two(*args):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(args)
        return train(*args)

    monkeypatch.setattr(fold_logits, "_train_fold", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        distill.main(arguments)
    trained.clear()
    distill.main(arguments)
    assert len(trained) == 1
    undisturbed = [str(tmp_path / "other") if word == str(tmp_path / "run") else word for word in arguments]
    monkeypatch.setattr(fold_logits, "_train_fold", train)
    distill.main(undisturbed)
    assert record_of(tmp_path / "other") == record_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--data.clean", "standrad"), "data.clean: expected steps among standard"),
        (("--data.clean", "html", "--data.clean.deploy", "case"), "expected steps of data.clean, found 'case'"),
        (("--data.clean", "labels", "--devices", "2"), "step labels: expected one process, found 2"),
        (("--data.clean", "html", "--task", "question-answering"), "expected another task than question-answering"),
        (
            ("--data.clean", "labels", "--task", "regression"),
            "step labels: expected text-classification or multi-label",
        ),
        (
            ("--data.clean", "names", "--clean.tagger", "my_tagger", "--task", "token-classification"),
            "step names: expected a task on whole texts",
        ),
    ],
)
def test_steps_that_cannot_be_applied_are_rejected_before_any_stage(
    more, message, inputs, tmp_path, monkeypatch, capsys
):
    assert message in rejection_of(distill, small_run(*inputs, tmp_path / "run", *more), monkeypatch, capsys)
    assert not (tmp_path / "run").exists()


def test_a_model_that_finds_no_names_is_rejected(inputs, tmp_path, monkeypatch, capsys):
    names = ("--data.clean", "names", "--clean.tagger", str(inputs[0]))
    message = rejection_of(distill, small_run(*inputs, tmp_path / "run", *names), monkeypatch, capsys)
    assert "clean.tagger: expected a token classifier with a label PER or PERSON, found BertModel" in message
    assert not (tmp_path / "run").exists()


def test_known_words_that_cannot_be_read_are_rejected_before_any_stage(inputs, tmp_path, monkeypatch, capsys):
    (tmp_path / "words.txt").write_bytes("größe".encode("utf-16"))
    for file, found in (("nowhere", "found none at"), ("words.txt", "expected text in UTF-8"), (".", "found none at")):
        more = ("--data.clean", "spelling", "--clean.words", str(tmp_path / file))
        message = rejection_of(distill, small_run(*inputs, tmp_path / "run", *more), monkeypatch, capsys)
        assert "clean.words" in message
        assert found in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_served_student_cleans_its_texts(reported_run, tmp_path):
    import runpy
    import sys

    folder = shutil.copytree(reported_run / "student" / "onnxruntime", tmp_path / "served", symlinks=False)
    examples = Path(__file__).parents[3] / "examples"
    sys.path.insert(0, str(examples))
    try:
        classifier = runpy.run_path(str(examples / "serve_onnxruntime.py"))["Classifier"](folder)
    finally:
        sys.path.remove(str(examples))
    assert classifier(["<p>bado bade</p>"]) == classifier(["bado bade"])
    assert classifier.tokenizer.truncation["max_length"] == 32  # data.max_length of the run
    (folder / PREPROCESSING).unlink()


@pytest.mark.slow
def test_the_published_tokenizer_applies_what_it_can(inputs, tmp_path):
    from transformers import AutoTokenizer

    steps = ("--data.clean", "html,whitespace", "--data.clean.deploy", "html,whitespace", "--epochs", "1")
    run_to_success("distill", small_run(*inputs, tmp_path / "run", *steps))
    student, teacher = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "run" / "student", inputs[0]))
    assert student("ba\u200bka") == teacher("baka")
    for folder in (tmp_path / "run" / "student").glob("**/tokenizer.json"):
        assert "Replace" in folder.read_text()


@pytest.mark.slow
def test_names_that_a_tagger_finds_are_masked(inputs, tokenizer, tmp_path):
    model = build_model("bert", "ForTokenClassification", id2label={0: "O", 1: "B-PER"}, label2id={"O": 0, "B-PER": 1})
    tagger = saved(model, tokenizer, tmp_path / "tagger")
    steps = ("--data.clean", "names", "--clean.tagger", str(tagger), "--until", "teacher")
    run_to_success("distill", small_run(*inputs, tmp_path / "run", *steps))
    finder = NameFinder(str(tagger))
    before, after = (texts_of(stage_folder(tmp_path / "run", stage), "train") for stage in ("data", "clean"))
    assert [finder.replace(text) for text in before] == after != before
