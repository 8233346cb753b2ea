"""Cascades of trained students: chosen, written, run in a process of their own, and evaluated."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines import cascade
from pipelines.settings.commands.cascade import name_members
from support.commands import rejection_of, run_to_success, small_run
from support.run_inputs import make_inputs
from support.task_data import multi_label_data, tagged_data
from support.tiny_models import build_model, saved

QUICK = ["--measure.texts", "12", "--measure.rounds", "2", "--measure.parity", "40"]


def read_result(output: Path) -> dict:
    return json.loads((output / "cascade" / "evaluation.json").read_text())


def ask_reader(output: Path, texts: list[str]) -> list[list[str]]:
    """Returns label, member and text of each line that the cascade's own reader prints, without the repository."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str((output / "cascade" / "reader.py").resolve())],
        cwd=output, env=env, input="\n".join(texts), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Returns the data, and the folders of runs with a static student and with one of two layers."""
    folder = tmp_path_factory.mktemp("students")
    teacher, data = make_inputs(folder)
    tuned = ("--teacher_train.epochs", "12", "--teacher_train.dropout", "0")
    runs = []
    for name, more in (
        ("static", ("--student", "static", "--epochs", "4", "--train.learning_rate", "0.01")),
        ("layers", ("--student", "layers=3", "--epochs", "12")),
    ):
        run_to_success("distill", small_run(teacher, data, folder / name, *tuned, *more))
        runs.append(folder / name)
    return data, *runs


@pytest.fixture(scope="module")
def cascade_run(students, tmp_path_factory) -> Path:
    data, static, layers = students
    output = tmp_path_factory.mktemp("cascade") / "run"
    (teacher,) = (layers / "teacher").glob("*/model")
    arguments = ["--models", f"{layers / 'student'},{static / 'student'}", "--teacher", str(teacher)]
    run_to_success("cascade", [*arguments, "--data", str(data), "--latency-ms", "50", *QUICK, "--output", str(output)])
    return output


@pytest.mark.slow
def test_a_cascade_predicts_in_a_separate_process_as_it_was_evaluated(cascade_run, students):
    result = read_result(cascade_run)
    with (students[0] / "test.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = ask_reader(cascade_run, [row["text"] for row in rows])
    assert [text for *_, text in lines] == [row["text"] for row in rows]
    accuracy = np.mean([label == row["label"] for (label, *_), row in zip(lines, rows, strict=True)])
    cascade_entry = result["models"][0]
    assert accuracy == pytest.approx(cascade_entry["score"])
    for name, share in cascade_entry["shares"].items():
        assert np.mean([member == name for _, member, _ in lines]) == pytest.approx(share)


@pytest.mark.slow
def test_every_model_is_measured_beside_the_cascade(cascade_run):
    entries = {entry["name"]: entry for entry in read_result(cascade_run)["models"]}
    assert set(entries) == {"cascade", "teacher", "static-student", "layers-student"}
    assert all(0 < each["mean_ms"] <= 1.5 * each["p95_ms"] and 0 <= each["score"] <= 1 for each in entries.values())
    assert (
        entries["cascade"]["score"]
        >= max(entries[name]["score"] for name in ("static-student", "layers-student")) - 0.1
    )


@pytest.mark.slow
def test_another_score_reuses_the_members_logits(cascade_run, students):
    data, static, layers = students
    arguments = ["--models", f"{layers / 'student'},{static / 'student'}", "--data", str(data), *QUICK]
    (teacher,) = (layers / "teacher").glob("*/model")
    again = [*arguments, "--teacher", str(teacher), "--output", str(cascade_run)]
    message = run_to_success("cascade", [*again, "--min-score-share", "0.5"])
    assert "member-logits: already complete, skipped" in message
    assert len(list((cascade_run / "thresholds").glob("*/cascade/cascade.json"))) == 2


@pytest.mark.slow
def test_an_unreachable_latency_is_rejected_and_the_exports_stay(cascade_run, students, monkeypatch, capsys):
    data, static, layers = students
    arguments = ["--models", f"{layers / 'student'},{static / 'student'}", "--data", str(data), *QUICK]
    (teacher,) = (layers / "teacher").glob("*/model")
    arguments += ["--teacher", str(teacher), "--latency-ms", "0.000001", "--output", str(cascade_run)]
    message = rejection_of(cascade, arguments, monkeypatch, capsys)
    assert "cascade: expected a mean latency of at most 1e-06 ms, found" in message
    assert list(cascade_run.glob("export-*/*/manifest.json"))


@pytest.mark.slow
def test_students_with_several_labels_make_a_cascade(body_folder, tmp_path):
    data = multi_label_data(tmp_path / "data")
    for name, spec in (("static", "static"), ("gru", "gru,hidden=32")):
        more = ("--student", spec, "--epochs", "8", "--teacher_train.epochs", "5", "--train.learning_rate", "0.01")
        run_to_success("distill", small_run(body_folder, data, tmp_path / name, *more))
    models = ",".join(str(tmp_path / name / "student") for name in ("static", "gru"))
    output = tmp_path / "cascade"
    run_to_success(
        "cascade", ["--models", models, "--data", str(data), "--min-score-share", "1", *QUICK, "--output", str(output)]
    )
    result = read_result(output)
    assert (result["metric"], len(result["models"])) == ("micro F1", 3)
    assert len(ask_reader(output, ["baka deka", "wober"])) == 2


def save_pair(tokenizer, folder: Path, head: str = "ForSequenceClassification") -> str:
    folders = [saved(build_model("bert", head, num_hidden_layers=n), tokenizer, folder / str(n)) for n in (1, 2)]
    return ",".join(map(str, folders))


def test_a_task_without_confidences_is_rejected_before_any_stage(tokenizer, tmp_path, monkeypatch, capsys):
    models = save_pair(tokenizer, tmp_path, "ForTokenClassification")
    arguments = ["--models", models, "--data", str(tagged_data(tmp_path / "data")), "--min-score-share", "0.9"]
    message = rejection_of(cascade, [*arguments, "--output", str(tmp_path / "out")], monkeypatch, capsys)
    assert "cascade: expected task multi-label or text-classification, found token-classification" in message
    assert not (tmp_path / "out").exists()


def test_a_student_whose_texts_are_cleaned_beside_it_is_rejected(tokenizer, data_folder, tmp_path, monkeypatch, capsys):
    models = save_pair(tokenizer, tmp_path)
    (tmp_path / "2" / "preprocessing.json").write_text('{"clean_texts_by": "spaces"}')
    arguments = [
        "--models",
        models,
        "--data",
        str(data_folder),
        "--min-score-share",
        "0.9",
        "--output",
        str(tmp_path / "out"),
    ]
    assert "found preprocessing.json beside it" in rejection_of(cascade, arguments, monkeypatch, capsys)


def test_names_of_results_are_not_those_of_members():
    assert name_members(["runs/a", "runs/file"]) == {"runs-a": "runs/a", "runs-file": "runs/file"}


@pytest.mark.parametrize(("more", "message"), [
    (("--models", "a"), "models: expected two or more checkpoints"),
    (("--models", "a,b,a"), "found 'a' twice"),
    (("--models", "a,b"), "expected --min-score-share or --latency-ms, found neither"),
    (("--models", "a,b", "--min-score-share", "0.9", "--latency-ms", "1"), "found both"),
    (("--models", "a,b", "--min-score-share", "1.2"), "min_score_share: expected a share from 0 to 1"),
    (("--models", "a,b", "--latency-ms", "-1"), "latency_ms: expected more than 0, found -1"),
    (("--models", "./a,b", "--min-score-share", "0.9"), "a './a': no such folder here"),
])  # fmt: skip
def test_bad_settings_are_rejected_by_name(more, message, data_folder, tmp_path, monkeypatch, capsys):
    arguments = [*more, "--data", str(data_folder), "--output", str(tmp_path / "out")]
    assert message in rejection_of(cascade, arguments, monkeypatch, capsys)
