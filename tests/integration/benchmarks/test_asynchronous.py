"""The benchmark of replicas that don't wait for each other: how one process is timed beside them."""

import argparse
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.distributed import asynchronous
from distill.data.batches.batches import EvalBatches
from distill.data.batches.data_module import RowsDataModule
from support.run_inputs import make_inputs

SECONDS = 2.0  # of a slowed validation


def test_one_process_is_timed_without_validation_as_replicas_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    teacher, data = make_inputs(tmp_path)
    validate, validations = RowsDataModule.val_dataloader, []

    def validate_slowly(module: RowsDataModule) -> EvalBatches:
        validations.append(module)
        time.sleep(SECONDS)
        return validate(module)

    monkeypatch.setattr(RowsDataModule, "val_dataloader", validate_slowly)
    sizes = {"rows": 32, "epochs": 1, "student": "layers=1", "model": str(teacher)}
    options = argparse.Namespace(data=str(data), output=tmp_path, accelerator="cpu", threads=1, every=2, **sizes)
    result = asynchronous.Comparison(options).train(asynchronous.ALONE, 10.0, 0)
    assert len(validations) == 1, "only after the training"
    assert 0 < result["seconds"] < SECONDS
    assert 0 <= result["validation"] <= 1
    assert 0 <= result["test"] <= 1
    assert result["sent_bytes"] == 0


def test_a_gpu_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    arguments = ["--data", str(tmp_path), "--output", str(tmp_path / "out"), "--accelerator", "gpu"]
    monkeypatch.setattr(sys, "argv", ["asynchronous", *arguments])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit):
        asynchronous.main()
    assert torch.get_num_threads() == threads
    assert "--accelerator: expected cpu, which replicas train on, found gpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
