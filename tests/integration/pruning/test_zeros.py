"""Sparse training: zeros follow the schedule, survive kills and quantization, and reach the exported student."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress.errors import CompressError
from compress.sparsity.config import SparsityConfig
from distill.losses.config import LossConfig
from pipelines import distill
from pipelines.stages.train.sparsity import SparsityCallback
from support.commands import rejection_of, run_to_success, small_run
from support.interrupted_training import BASE, Killed, killed_at, train_once
from support.run_inputs import make_inputs

SPARSITIES = {
    "2:4": SparsityConfig("2:4"),
    "movement": SparsityConfig("unstructured", 0.7, score="movement"),
    "rewired": SparsityConfig("4x1", 0.5, rewire=0.3),
}


def zeros_of(weights: dict[str, torch.Tensor], prefix: str = "student.") -> dict[str, float]:
    """Returns the share of zeros of each matrix inside the layers, by name."""
    return {
        name: float((value == 0).float().mean())
        for name, value in weights.items()
        if name.startswith(prefix) and ".layer." in name and value.dim() == 2
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SPARSITIES))
def test_a_killed_sparse_training_resumes_with_identical_weights(name, tiny_model, tokenizer, tmp_path, monkeypatch):
    config, loss = SPARSITIES[name], LossConfig(kl=1)
    expected = train_once(tiny_model, tokenizer, tmp_path / "whole", BASE, loss, [SparsityCallback(config)])
    shares = zeros_of(expected)
    assert len(shares) == 2 * 6
    assert all(share == pytest.approx(config.build_schedule(100).final_share, abs=0.02) for share in shares.values())
    for batch in (5, 9, 16):
        with monkeypatch.context() as patch:
            killed_at(batch, patch)
            with pytest.raises(Killed):
                train_once(tiny_model, tokenizer, tmp_path / str(batch), BASE, loss, [SparsityCallback(config)])
        weights = train_once(tiny_model, tokenizer, tmp_path / str(batch), BASE, loss, [SparsityCallback(config)])
        assert all(torch.equal(weights[name], value) for name, value in expected.items()), f"after a kill at {batch}"


def test_holding_zeros_changes_nothing_in_a_dense_student(tiny_model, tokenizer, tmp_path):
    config = replace(BASE, epochs=1)
    dense = zeros_of(train_once(tiny_model, tokenizer, tmp_path / "dense", config, LossConfig(kl=1)))
    callbacks = [SparsityCallback(SparsityConfig("2:4"), is_sparse=True)]
    shares = zeros_of(train_once(tiny_model, tokenizer, tmp_path / "held", config, LossConfig(kl=1), callbacks))
    assert shares == dense, "a student without zeros has none to hold"


@pytest.mark.slow
def test_zeros_are_kept_through_distillation_and_quantization(tmp_path: Path):
    teacher, data = make_inputs(tmp_path)
    arguments = small_run(teacher, data, tmp_path / "run", "--epochs", "3", "--sparsity.pattern", "2:4")
    run_to_success("distill", [*arguments, "--quantize", "int8", "--quantize.samples", "32"])
    shares = zeros_of(load_file(tmp_path / "run" / "student" / "model.safetensors"), "")
    assert shares
    assert all(share >= 0.5 for share in shares.values())
    (stage,) = (tmp_path / "run" / "distill").iterdir()
    assert json.loads((stage / "manifest.json").read_text())["metrics"]["zeros"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sparsity.pattern", "2:4", "--patience", "1"], "train.patience 1: expected 0 with sparsity.pattern"),
        (["--sparsity.amount", "0.8"], "sparsity.amount 0.8: expected a pattern as well"),
        (["--sparsity.pattern", "3of4"], "sparsity.pattern: expected unstructured, N:M"),
    ],
)
def test_invalid_sparsity_settings_are_rejected(arguments, expected, tmp_path, monkeypatch, capsys):
    teacher, data = make_inputs(tmp_path)
    assert expected in rejection_of(
        distill, small_run(teacher, data, tmp_path / "run", *arguments), monkeypatch, capsys
    )


def test_a_schedule_that_ends_before_it_begins_is_rejected():
    with pytest.raises(CompressError, match="the first below the second, found 0.6 and 0.5"):
        SparsityConfig("2:4", begin=0.6, end=0.5)
