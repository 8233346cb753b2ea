"""Static sentence encoders beside model2vec's, at tiny size, with the real library."""

import json
import sys

import pytest

from support.commands import QUICK_MEASUREMENT
from support.task_data import pair_data
from support.tiny_models import build_model, saved


@pytest.mark.slow
def test_encoders_are_trained_beside_those_of_model2vec(tokenizer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("skeletoken")  # of `model2vec[distill]`
    from benchmarks.students import attention_free_encoders

    data = pair_data(tmp_path / "pairs")
    teacher = saved(build_model("bert", "Model"), tokenizer, tmp_path / "teacher")
    arguments = ["--teacher", teacher, "--data", data, "--specs", "static", "--rates", "1e-3", "1e-2", "--width", "8"]
    arguments += ["--seeds", "0", "1", "--output", tmp_path / "out", "--epochs", "2", "--data.max_length", "32"]
    arguments += ["--precision", "32", "--threads", "1", *QUICK_MEASUREMENT]
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    attention_free_encoders.main()
    table = capsys.readouterr().out
    assert {line.split()[1] for line in table.splitlines() if line.startswith("│")} == {
        "teacher",
        "model2vec",
        "static",
    }
    reports = sorted((tmp_path / "out" / "reports").iterdir())
    assert len(reports) == 3, "both rates of the first seed, the better one of the second"
    configs = [json.loads(report.read_text())["config"] for report in reports]
    assert {config["seed"] for config in configs} == {0, 1}
