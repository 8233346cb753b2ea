"""The benchmark of students without attention, on a tiny teacher and few texts."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.students import attention_free_students
from support.run_inputs import write_data
from support.tiny_models import LABELS, build_model, make_rows, saved


@pytest.fixture
def run_benchmark(tmp_path, tokenizer, monkeypatch):
    """Returns a function that compares methods, and returns the lines of their results."""

    def run(*methods: str, write_data=write_data, **config) -> list[dict]:
        teacher, output = saved(build_model("bert", **config), tokenizer, tmp_path / "teacher"), tmp_path / "o"
        arguments = ["--teacher", str(teacher), "--data", str(write_data(tmp_path / "data")), "--output", str(output)]
        tiny = ["--methods", *methods, "--epochs", "2", "--seeds", "0", "1", "--rounds", "2", "--width", "16"]
        monkeypatch.setattr(sys, "argv", ["attention_free_students", *arguments, *tiny])
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which the benchmark sets
        threads = torch.get_num_threads()
        attention_free_students.main()
        torch.set_num_threads(threads)
        return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]

    return run


@pytest.mark.slow
def test_a_student_is_trained_at_each_rate_and_then_from_each_seed(run_benchmark, capsys):
    lines = run_benchmark("static", "cnn")
    for method in ("static", "cnn"):
        results = [line for line in lines if line["method"] == method]
        rates = len(attention_free_students.RATES)
        assert [line["seed"] for line in results] == [0] * rates + [1]
        best = max(results[:rates], key=lambda line: line["validation"])
        assert results[rates]["rate"] == best["rate"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("teacher", "static", "cnn", "% of the teacher"))


@pytest.mark.slow
def test_the_peers_are_trained_and_timed_in_the_same_way(run_benchmark, capsys):
    pytest.importorskip("skeletoken")  # of the extra `bench`
    peers = (attention_free_students.PEER, attention_free_students.TRAINED_PEER)
    lines = run_benchmark("static", *peers)
    tried = (attention_free_students.PENALTIES, attention_free_students.PEER_RATES)
    for peer, values in zip(peers, tried, strict=True):
        results = [line for line in lines if line["method"] == peer]
        assert sorted(line["rate"] for line in results[: len(values)]) == sorted(values)
        assert all(0 <= line["test"] <= 1 and line["parameters"] > 0 for line in results)
    printed = capsys.readouterr().out
    assert all(peer in printed for peer in peers)


def write_multi_label_data(folder: Path) -> Path:
    """Writes texts that have the labels of one or two rows of a data set."""
    folder.mkdir()
    for split, count, seed in (("train", 120, 1), ("test", 40, 2)):
        (text, label), *others = make_rows(count, seed)
        rows = [{"text": text, "labels": [label]}]
        for other_text, other in others:
            rows.append({"text": f"{text} {other_text}", "labels": sorted({label, other})})
            text, label = other_text, other
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_texts_with_several_labels_are_scored_by_f1(run_benchmark, capsys):
    pytest.importorskip("skeletoken")  # of the extra `bench`
    several = {"problem_type": "multi_label_classification"}
    lines = run_benchmark("static", attention_free_students.PEER, write_data=write_multi_label_data, **several)
    scores = [
        max(line["validation"] for line in lines if line["method"] == method) for method in ("static", "model2vec")
    ]
    assert all(0 < score <= 1 for score in scores)
    assert all(line["parameters"] > 16 * len(LABELS) for line in lines)
    assert "test micro F1" in capsys.readouterr().out
