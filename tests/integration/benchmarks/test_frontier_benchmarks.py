"""Benchmarks of pruned students on tiny models: frontiers, ingredients, speeds measured again, and cascades."""

import csv
import json
import sys
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.students import cascades, frontier, ingredients, repeated_speeds, sentences
from support.commands import QUICK_MEASUREMENT
from support.run_inputs import make_classifier_inputs

SMALL = (
    *("--attention_free_train.epochs", "2", "--attention_free_train.batch_size", "16", "--batch_size", "8"),
    *("--precision", "32"),
    *("--threads", "1", "--data.max_length", "32", "--learning_rate", "1e-3", "--prune.samples", "32"),
    *("--prune.trial_steps", "2", "--budget.rounds", "1", "--budget.retries", "0", *QUICK_MEASUREMENT),
)
SPEEDS = "1.1,1.3"


def call(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    benchmark.main()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_classifier_inputs(tmp_path_factory.mktemp("inputs"), neurons=2048)


@pytest.mark.slow
def test_students_of_a_frontier_are_timed_again_and_put_into_cascades(inputs, tmp_path, monkeypatch, capsys):
    model, data = inputs
    source = ["--data", data, "--output", tmp_path / "frontier", "--seeds", 0]
    more = ["--student.attention_free", "static,embeddings=8", "--epochs", 2, *SMALL, "--budget.precision", "fp32"]
    call(frontier, monkeypatch, *source, "--teacher", model, "--speedup", SPEEDS, *more)
    assert "student-1.1x" in capsys.readouterr().out
    call(repeated_speeds, monkeypatch, tmp_path / "frontier" / "seed-0", "--texts", 32, "--output", tmp_path / "again")
    first, second = [json.loads(line) for line in (tmp_path / "again" / "results.jsonl").read_text().splitlines()]
    assert (first["requested"], second["requested"]) == (1.1, 1.3)
    assert min(first["repeated"], second["repeated"]) > 0.2
    output = tmp_path / "cascades"
    arguments = ["--frontier", tmp_path / "frontier", "--data", data, "--seeds", 0, "--output", output]
    call(cascades, monkeypatch, *arguments, "--data.max_length", 32, "--measure.texts", 12, "--measure.rounds", 2)
    result = json.loads((output / "student-1.3x-0.json").read_text())
    assert {entry["name"] for entry in result["models"]} >= {"cascade", "student-1.1x", "student-1.3x", "teacher"}


def test_models_are_timed_again_on_what_they_take_in_one_call(tmp_path):
    file, words = tmp_path / "pairs.parquet", tmp_path / "words.parquet"
    pairs = [{"text": "a", "text2": "b"}, {"text": "c", "text2": "d"}]
    pq.write_table(pa.Table.from_pylist(pairs), file)
    assert list(repeated_speeds.read_texts(file, "text-classification")) == [
        ("a", "b"),
        ("c", "d"),
    ]
    assert list(repeated_speeds.read_texts(file, "sentence-embedding")) == ["a", "b", "c", "d"]
    pq.write_table(pa.Table.from_pylist([{"tokens": ["a", "b"]}]), words)
    assert list(repeated_speeds.read_texts(words, "token-classification")) == [["a", "b"]]


@pytest.mark.slow
def test_an_ingredient_changes_one_setting_of_the_plain_student(inputs, tmp_path, monkeypatch, capsys):
    model, data = inputs
    monkeypatch.setattr(ingredients, "find_gain", lambda plain: 1.05)  # of so small a model it is noise
    source = ["--data", data, "--output", tmp_path, "--seeds", 0, "--teacher", model, "--speedup", SPEEDS]
    source += ["--epochs", 2, "--budget.runtime", "pytorch", "--budget.precision", "fp32"]
    call(ingredients, monkeypatch, *source, "--variants", "averaged", "two steps", "assistant", *SMALL)
    table = capsys.readouterr().out
    assert "averaged" in table
    plain, averaged, further, assistant = (
        json.loads((tmp_path / "reports" / f"{name}-0.json").read_text())
        for name in ("plain", "averaged", "two-steps", "assistant")
    )
    assert find_shapes(plain) == find_shapes(averaged) != []
    assert averaged["config"]["train"]["ema_decay"] == 0.998
    assert [entry["target"]["target"]["speedup"] for entry in further["models"] if "target" in entry] == [1.3]
    assert assistant["config"]["teacher"]["model"] == find_checkpoint(plain, "student-1.1x")


def find_shapes(report: dict) -> list[str]:
    return [each["folder"] for each in report["stages"] if each["name"].startswith("shape")]


def find_checkpoint(report: dict, name: str) -> str:
    return next(each["path"] for each in report["models"] if (each["name"], each["runtime"]) == (name, "pytorch"))


def make_report(scores: dict[str, float], *, requested: float | None = None) -> dict:
    entries = [
        {
            "name": name, "runtime": "onnxruntime", "precision": "fp32", "score": score, "validation": score,
            "bytes": 4_000_000, "params": 1_000_000,
            "speedup": {"vs_teacher_same_runtime": 1.0 if name == "teacher" else 9.7},
        }
        for name, score in scores.items()
    ]  # fmt: skip
    if requested:
        target = {"target": {"name": f"{requested:g}x", "speedup": requested}, "share": {"value": 9.7 / requested}}
        entries[1]["target"] = target
    return {"metric": "accuracy", "models": entries, "stages": []}


def test_a_frontier_lists_what_each_student_keeps_and_whether_it_is_fast_enough():
    reports = [
        make_report({"teacher": 0.8, "student": score}, requested=requested)
        for score, requested in ((0.76, 10), (0.72, 12))
    ]
    teacher, student = frontier.build_rows(reports)
    assert teacher[:4] == ("teacher", "80.00 ± 0.00", "100.00 ± 0.00", "1.0 (1.0-1.0)")
    assert student == ("student", "74.00 ± 2.83", "92.50 ± 3.54", "9.7 (9.7-9.7)", "1 of 2", "4.0", "1.00M")
    assert frontier.describe_baseline(reports[0]) == "no constant answer is scored"


def make_student_report(*scores: float) -> dict:
    """Returns a report of students with requested speeds of 10, 11, … and a measured one of 9.7."""
    reports = [make_report({"teacher": 0.9, f"student-{n}": s}, requested=10.0 + n) for n, s in enumerate(scores)]
    return {"models": [entry for each in reports for entry in each["models"][1:]], "stages": []}


def test_the_speeds_of_an_assistants_students_are_over_the_teacher():
    assistant = make_student_report(0.75)
    assistant["models"][0]["speedup"]["vs_teacher_same_runtime"] = 2.0  # over the plain student, which has 9.7
    reports = {"plain": [make_student_report(0.8, 0.7)], "two steps": [assistant], "assistant": [assistant]}
    *_, two_steps, of_assistant = ingredients.build_rows(reports)
    assert (two_steps[1], two_steps[4]) == ("11", "2.0")
    assert (of_assistant[1], of_assistant[4]) == ("11", "19.4")


def test_gains_are_over_the_plain_student_of_the_same_seed_and_speed():
    report = make_student_report
    reports_by_name = {"plain": [report(0.8, 0.7), report(0.8, 0.6)], "two steps": [report(0.75), report(0.65)]}
    slow, quick, further = ingredients.build_rows(reports_by_name)
    assert slow[:4] == ("plain", "10", "80.00 ± 0.00", "")
    assert quick[:3] == ("plain", "11", "65.00 ± 7.07")
    assert further[:4] == ("two steps", "11", "70.00 ± 7.07", "+5.00 ± 0.00")


def test_an_assistant_leaves_out_the_speeds_that_it_reaches(monkeypatch):
    runs = object.__new__(ingredients.Ingredients)
    monkeypatch.setattr(runs, "list_faster", lambda seed: [4.0, 10.0, 20.0], raising=False)
    monkeypatch.setattr(runs, "run", lambda variant, seed: {}, raising=False)
    monkeypatch.setattr(ingredients, "find_gain", lambda plain: 5.0)
    assert runs.list_remaining(0) == [2.0, 4.0]
    monkeypatch.setattr(ingredients, "find_gain", lambda plain: 30.0)
    with pytest.raises(SystemExit, match="expected some above 30.00 for assistant"):
        runs.list_remaining(0)


def test_sentences_are_different_lines_within_the_range_of_words(tmp_path, monkeypatch, capsys):
    texts = ["One line here.\nToo short\n One line here. ", "Another line, too.\nThis one has too many words for it."]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    call(sentences, monkeypatch, "--data", tmp_path, "--words", 3, 5, "--output", tmp_path / "sentences.csv")
    with (tmp_path / "sentences.csv").open(newline="") as file:
        rows = [row["text"] for row in csv.DictReader(file)]
    assert sorted(rows) == ["Another line, too.", "One line here."]
    call(sentences, monkeypatch, "--data", tmp_path, "--words", 1, 9, "--count", 3, "--output", tmp_path / "three.csv")
    assert len((tmp_path / "three.csv").read_text().splitlines()) == 4
    assert "3 sentences" in capsys.readouterr().out
