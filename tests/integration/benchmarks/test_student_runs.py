"""Benchmarks of augmentation and selection: the rows that they draw, the variants, and the table of their results."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.tables import draw_few, find_table, read_table, write_table
from benchmarks.data import augmentation, cleaning, selection
from benchmarks.data.student_runs import HEADER, StudentRuns, choose_variants
from support.run_inputs import make_inputs


def make_result(variant: str, rate: float, seed: int, validation: float, test: float) -> dict:
    costs = {"rows": 10, "steps": 20, "seconds": 3.0, "data_seconds": 1.0}
    return {"variant": variant, "rate": rate, "seed": seed, "validation": validation, "test": test, **costs}


def test_the_table_has_each_variant_at_its_best_rate_and_gains_by_seed(tmp_path):
    lines = [make_result("none", 1e-3, seed, 0.5, 0.5 + 0.1 * seed) for seed in (0, 1)]
    lines += [make_result("none", 1e-4, 0, 0.4, 0.9)]
    lines += [make_result("noise", 1e-4, seed, 0.6, 0.6 + 0.1 * seed) for seed in (0, 1)]
    write_table(tmp_path / "results.jsonl", lines)
    none, noise = StudentRuns(tmp_path, [], 32).table(["none", "noise", "unknown"], "none")
    assert len(none) == len(HEADER)
    assert none[:5] == ("none", "55.00", "7.07", "+0.00 ± 0.00", "0.001")
    assert noise[:5] == ("noise", "65.00", "7.07", "+10.00 ± 0.00", "0.0001")


def test_few_rows_are_drawn_of_each_class_by_the_seed():
    rows = [{"label": str(number % 3)} for number in range(30)]
    drawn = draw_few(rows, "label", 2, 0, 0)
    assert Counter(rows[row]["label"] for row in drawn) == {"0": 2, "1": 2, "2": 2}
    assert drawn == draw_few(rows, "label", 2, 0, 0) != draw_few(rows, "label", 2, 0, 1)
    assert len(draw_few(rows, "label", 0, 7, 0)) == 7


@pytest.mark.slow
def test_students_are_trained_on_every_variant_and_finished_ones_are_kept(tmp_path, monkeypatch, capsys):
    teacher, data = make_inputs(tmp_path)
    rows = read_table(data, "train")
    monkeypatch.setattr(augmentation, "COMMON", f"--teacher {teacher} --precision 32 --data.max_length 32")
    monkeypatch.setattr(augmentation, "VALIDATION", 20)
    arguments = ["x", "--data", str(data), "--output", str(tmp_path / "out"), "--per-class", "4", "--visits", "60"]
    arguments += ["--times", "1", "--teacher-epochs", "1", "--student", "layers=2", "--seeds", "0", "--rates", "1e-3"]
    monkeypatch.setattr("sys.argv", arguments)
    score, lengths = StudentRuns.score, []

    def record_length(runs: StudentRuns, model: Path, stages: Mapping[str, Any], max_length: int) -> float:
        lengths.append(max_length)
        return score(runs, model, stages, max_length)

    monkeypatch.setattr(StudentRuns, "score", record_length)
    augmentation.main()
    assert set(lengths) == {32}, "that of the training"
    results = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["variant"] for line in results} >= {"none", "order", "noise", "all unlabelled text"}
    assert len(read_table(tmp_path / "out" / "data", "train")) == 20
    assert len([*(tmp_path / "out").glob("pool.jsonl")]) == 1
    assert len((tmp_path / "out" / "pool.jsonl").read_text().splitlines()) == len(rows) - 40
    augmentation.main()
    assert (tmp_path / "out" / "results.jsonl").read_text().splitlines() == results


@pytest.mark.slow
def test_students_learn_from_clean_damaged_and_cleaned_rows(tmp_path, monkeypatch, capsys):
    teacher, data = make_inputs(tmp_path)
    monkeypatch.setattr(cleaning, "TEACHER", f"--teacher {teacher} --precision 32")
    monkeypatch.setattr(cleaning, "TEACHER_EPOCHS", 1)
    monkeypatch.setattr(cleaning, "STUDENT", "--student layers=2 --epochs 2 --data.max_length 32")
    arguments = ["x", "--data", str(data), "--output", str(tmp_path / "out"), "--students", "--seeds", "0", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--steps", "standard,language=off"])
    cleaning.main()
    file = tmp_path / "out" / "students" / "results.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()]
    rows = {each["variant"]: each["rows"] for each in results}
    assert len(results) == 8
    assert rows["clean"] < rows["damaged"]
    assert rows["cleaned"] < rows["damaged"]
    assert all(each["steps"] == 2 * -(-each["rows"] // 32) for each in results)


def test_variants_are_chosen_by_name():
    variants = {"none": [], "noise": ["--data.augment=noise"]}
    assert choose_variants(variants, None) == variants
    assert choose_variants(variants, ["noise"]) == {"noise": ["--data.augment=noise"]}
    with pytest.raises(SystemExit, match="expected some of none, noise, found nosie"):
        choose_variants(variants, ["noise", "nosie"])


def test_a_pool_has_variants_without_it_and_with_all_of_it(tmp_path):
    options = argparse.Namespace(share=0.1, pool="texts/", output=tmp_path, methods=None)
    variants = selection.list_variants(options)
    assert list(variants)[:2] == ["no pool", "all"]
    target = f"--select.target={tmp_path / 'target.jsonl'}"
    assert variants["similarity, embeddings"][-2:] == ["--select.vectors=embeddings", target]
    options.pool = ""
    assert list(selection.list_variants(options))[:2] == ["all", "random"]


def test_a_preference_and_vectors_are_told_apart_in_the_name_of_a_method(tmp_path):
    options = argparse.Namespace(share=0.1, pool="", output=tmp_path, methods=["entropy, easy", "mixture, embeddings"])
    variants = selection.list_variants(options)
    share = "--select.share=0.1"
    assert variants["entropy, easy"] == ["--data.select=entropy", share, "--select.prefer=easy"]
    assert variants["mixture, embeddings"] == ["--data.select=mixture", share, "--select.vectors=embeddings"]


@pytest.mark.parametrize("name", ["validation", "dev"])
@pytest.mark.parametrize("per_class", [0, 2])
def test_a_validation_split_of_the_data_set_is_kept(name, per_class, tmp_path):
    data, output = tmp_path / "data", tmp_path / "out"
    rows = [{"text": f"text {number}", "label": str(number % 3)} for number in range(30)]
    for split, part in (("train", rows[:20]), (name, rows[20:25]), ("test", rows[25:])):
        write_table(data / f"{split}.jsonl", part)
    options = argparse.Namespace(data=str(data), output=output, per_class=per_class, rows=0, pool="")
    assert selection.write_rows(options) == (6 if per_class else 20)
    assert read_table(output / "data", "validation") == rows[20:25]


def test_without_a_validation_split_few_rows_are_judged_by_others_and_all_rows_by_the_runs_own(tmp_path):
    data = tmp_path / "data"
    rows = [{"text": f"text {number}", "label": str(number % 3)} for number in range(30)]
    write_table(data / "train.jsonl", rows)
    write_table(data / "test.jsonl", rows[:3])
    few = argparse.Namespace(data=str(data), output=tmp_path / "few", per_class=2, rows=0, pool="")
    selection.write_rows(few)
    train, validation = (read_table(few.output / "data", split) for split in ("train", "validation"))
    assert sorted(row["text"] for row in [*train, *validation]) == sorted(row["text"] for row in rows)
    selection.write_rows(argparse.Namespace(data=str(data), output=tmp_path / "all", per_class=0, rows=0, pool=""))
    assert find_table(tmp_path / "all" / "data", "validation") is None
