"""Batches are divided among unequal replicas without changing what is trained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distill.losses.logits import IGNORED
from pipelines.runs.rank_meter import RankMeter
from pipelines.runs.training_logs import RANKS
from pipelines.settings.commands.distill import MachineConfig
from support.processes.ranks import run_ranks
from support.processes.training_ranks import Training, splits, train
from support.run_outputs import weights_that_differ
from support.tiny_models import saved

NEAR = 1e-5
ROWS = len(splits().train.texts)


@pytest.fixture(scope="module")
def student(tmp_path_factory, tokenizer, tiny_model) -> Path:
    return saved(tiny_model("bert", num_hidden_layers=4), tokenizer, tmp_path_factory.mktemp("student") / "model")


def train_and_count(rank: int, processes: int, job: Training, layout: str) -> dict[str, Any]:
    """Trains, and also returns how many rows this process has computed."""
    rows: list[int] = []
    start_batch = RankMeter.on_train_batch_start

    def count(meter: RankMeter, trainer, pl_module, batch, batch_idx) -> None:
        rows.append(int((batch["labels"] != IGNORED).sum()))  # a process without rows gets one without a label
        start_batch(meter, trainer, pl_module, batch, batch_idx)

    RankMeter.on_train_batch_start = count  # type: ignore[method-assign]
    return train(rank, processes, job, layout) | {"rows": sum(rows)}


@pytest.mark.parametrize(
    ("layout", "speeds"), [("replicated", "auto"), pytest.param("zero1", "1,3", marks=pytest.mark.slow)]
)
def test_replicas_of_unequal_speeds_train_the_same_student(layout, speeds, student, tmp_path_factory):
    single, divided = (Training(student, tmp_path_factory.mktemp(name)) for name in ("single", "divided"))
    expected = train(0, 1, single, "replicated")["weights"]
    job = replace(divided, machine=MachineConfig(accelerator="cpu", rank_speeds=speeds))
    found = run_ranks(train_and_count, 2, 2, job, layout, limit=120)
    for each in found:
        assert weights_that_differ(each["weights"], expected, NEAR) == {}
    first, second = (each["rows"] for each in found)
    assert first + second == single.train.epochs * ROWS
    (file,) = divided.folder.rglob(RANKS)
    ranks = json.loads(file.read_text())
    assert len(ranks) == 2
    if speeds == "auto":
        assert ranks[0]["speed"] != ranks[1]["speed"], "no measurement has changed them"
    else:
        assert [each["speed"] for each in ranks] == pytest.approx([0.5, 1.5])
        assert second / first == pytest.approx(3, rel=0.3)  # of tokens, which whole rows can't match exactly
