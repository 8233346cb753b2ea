"""The benchmark of students without attention, on a tiny teacher and few texts; without its peer, which is an extra."""

import json
import sys

import pytest
import torch

from benchmarks.students import attention_free_students
from support.run_inputs import write_data
from support.tiny_models import build_model, saved


@pytest.mark.slow
def test_a_student_is_trained_at_each_rate_and_then_from_each_seed(tmp_path, tokenizer, capsys, monkeypatch):
    teacher, output = saved(build_model("bert"), tokenizer, tmp_path / "teacher"), tmp_path / "o"
    arguments = ["--teacher", str(teacher), "--data", str(write_data(tmp_path / "data")), "--output", str(output)]
    tiny = ["--methods", "static", "cnn", "--epochs", "2", "--seeds", "2", "--rounds", "2", "--width", "16"]
    monkeypatch.setattr(sys, "argv", ["attention_free_students", *arguments, *tiny])
    threads = torch.get_num_threads()
    attention_free_students.main()
    torch.set_num_threads(threads)
    lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    for method in ("static", "cnn"):
        results = [line for line in lines if line["method"] == method]
        rates = len(attention_free_students.RATES)
        assert [line["seed"] for line in results] == [0] * rates + [1]
        best = max(results[:rates], key=lambda line: line["validation"])
        assert results[rates]["rate"] == best["rate"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("teacher", "static", "cnn", "% of the teacher"))
