"""The benchmark of normalizations, on a tiny teacher and few texts."""

import re
import sys

import pytest
import torch

from benchmarks.students import normalizations
from distill.checkpoint.norm_kinds import NORM_KINDS
from support.run_inputs import write_csv
from support.tiny_models import build_model, make_rows, saved


@pytest.mark.slow
def test_every_kind_is_trained_from_every_seed_and_measured(tmp_path, tokenizer, capsys, monkeypatch):
    teacher, data, output = (
        saved(build_model("bert"), tokenizer, tmp_path / "teacher"),
        tmp_path / "data",
        tmp_path / "o",
    )
    data.mkdir()
    for split, count, seed in (("train", 120, 1), ("test", 20, 2)):
        write_csv(data / f"{split}.csv", make_rows(count, seed))
    arguments = ["--teacher", str(teacher), "--data", str(data), "--student", "layers=2", "--output", str(output)]
    tiny = ["--epochs", "1", "--seeds", "0", "1", "--rates", "1e-3", "5e-3", "--rounds", "1", "--rows", "64"]
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["normalizations", *arguments, *tiny])
    normalizations.main()
    torch.set_num_threads(threads)
    lines = [re.split(r"\s*[│|]\s*", line.strip("│| ")) for line in capsys.readouterr().out.splitlines()]
    rows = {name: cells for name, *cells in lines if cells}
    assert rows.keys() >= {*NORM_KINDS, normalizations.COPY}
    counts = {kind: int(rows[kind][0].replace(",", "")) for kind in NORM_KINDS}
    assert counts["layernorm"] == counts["nonorm"] == counts["batchnorm"] == counts["rmsnorm"] + 5 * 32
    files = {path.parent.parent.name: path.stat().st_size for path in output.rglob("onnxruntime/model.onnx")}
    assert {kind: int(rows[kind][1].replace(",", "")) for kind in NORM_KINDS} == files
    for kind in NORM_KINDS:
        assert (
            len(list(output.rglob(f"{kind}-*/training.json"))) == 3
        )  # two rates with the first seed, one with the second
        assert "±" in rows[kind][-1]
