"""A student trained on several processes is the student of one process."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from conftest import saved
from ranks import run_ranks
from training_ranks import Training, train

NEAR = 1e-5


@pytest.fixture(scope="module")
def student(tmp_path_factory, tokenizer, tiny_model) -> Path:
    return saved(tiny_model("bert", num_hidden_layers=4), tokenizer, tmp_path_factory.mktemp("student") / "model")


@pytest.fixture(scope="module")
def alone(student, tmp_path_factory) -> dict:
    return train(0, 1, Training(student, tmp_path_factory.mktemp("alone")), "replicated")


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, "replicated"),
        (2, "zero1"),
        (2, "zero2"),
        (2, "fsdp=2"),
        (2, "tp=2"),
        (2, "pp=2"),
        (4, "hsdp=2x2"),
        pytest.param(4, "fsdp=2,tp=2", marks=pytest.mark.slow),
        pytest.param(4, "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param(4, "pp=4", marks=pytest.mark.slow),
    ],
)
def test_another_layout_trains_another_student(processes, layout, student, alone, tmp_path):
    found = run_ranks(train, processes, processes, Training(student, tmp_path), layout, limit=120)
    for rank in range(processes):
        held = found[rank]["weights"]
        assert layout.startswith("pp") or held.keys() == alone["weights"].keys()
        assert off(held, alone["weights"]) == {}
        assert found[rank]["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").state_dict()
    assert loaded.keys() == alone["weights"].keys()
    for each in found:
        assert all(torch.equal(loaded[name], value) for name, value in each["weights"].items())


def test_a_run_that_goes_on_in_another_layout_ends_elsewhere(student, alone, tmp_path):
    legs = [(2, "fsdp=2", 3), (4, "hsdp=2x2", 4), (2, "tp=2", 2), (2, "zero1", 2), (1, "replicated", None)]
    often = replace(Training(student, tmp_path).train, checkpoint_every=1)
    for number, (processes, layout, stop) in enumerate(legs):
        job = Training(student, tmp_path, train=often, stop=stop)
        if processes > 1:
            assert run_ranks(train, processes, processes, job, layout, limit=120) == [{}] * processes, number
            (tmp_path.parent / f"{tmp_path.name}.world").unlink()
        else:
            ended = train(0, 1, job, layout)
    assert off(ended["weights"], alone["weights"]) == {}


def off(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Weights that differ, and by how much.

    A key's bias moves no output: its gradient is rounding alone, of which Adam makes whole steps.
    """
    differences = {n: (found[n] - expected[n]).abs().max().item() for n in found if not n.endswith("key.bias")}
    return {name: most for name, most in differences.items() if most > NEAR}
