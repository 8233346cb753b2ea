"""Batches are divided among unequal replicas without changing what is trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.runs.training_logs import RANKS
from pipelines.settings.commands.distill import MachineConfig
from support.processes.ranks import run_ranks
from support.processes.training_ranks import Training, train
from support.tiny_models import saved

NEAR = 1e-5


@pytest.fixture(scope="module")
def student(tmp_path_factory, tokenizer, tiny_model) -> Path:
    return saved(tiny_model("bert", num_hidden_layers=4), tokenizer, tmp_path_factory.mktemp("student") / "model")


@pytest.mark.parametrize(
    ("layout", "speeds"), [("replicated", "auto"), pytest.param("zero1", "1,3", marks=pytest.mark.slow)]
)
def test_replicas_of_unequal_speeds_train_the_same_student(layout, speeds, student, tmp_path_factory):
    single, divided = (Training(student, tmp_path_factory.mktemp(name)) for name in ("single", "divided"))
    expected = train(0, 1, single, "replicated")["weights"]
    job = replace(divided, machine=MachineConfig(accelerator="cpu", rank_speeds=speeds))
    for found in run_ranks(train, 2, 2, job, layout, limit=120):
        differences = {name: float((found["weights"][name] - value).abs().max()) for name, value in expected.items()}
        assert max(differences.values()) < NEAR
    (file,) = divided.folder.rglob(RANKS)
    ranks = json.loads(file.read_text())
    assert len(ranks) == 2
    assert min(each["idle_share"] for each in ranks) >= 0
    assert sum(each["speed"] for each in ranks) == pytest.approx(2)
