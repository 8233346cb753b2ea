"""Offloaded activations train the same student in every layout that they work in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.train.offload import ActivationOffload
from distill.train.offload_file import ActivationFile
from support.processes.ranks import run_ranks
from support.processes.training_ranks import Training, train
from support.tiny_models import saved


@pytest.fixture(scope="module")
def student(tmp_path_factory, tokenizer, tiny_model) -> Path:
    return saved(tiny_model("bert", num_hidden_layers=4), tokenizer, tmp_path_factory.mktemp("student") / "model")


def train_and_count(rank: int, processes: int, job: Training, layout: str) -> dict[str, Any]:
    """Trains with every storage offloaded, whatever its size; also returns the sizes of those stored."""
    ActivationOffload.__init__.__kwdefaults__["smallest"] = 1
    sizes: set[int] = set()
    store = ActivationFile.store

    def count(file: ActivationFile, content: Tensor) -> Any:
        sizes.add(len(content))
        return store(file, content)

    ActivationFile.store = count  # type: ignore[method-assign]
    return train(rank, processes, job, layout) | {"sizes": sizes}


@pytest.mark.parametrize(
    ("processes", "layout", "mode"),
    [
        (2, "fsdp=2", "full"),
        *(
            pytest.param(processes, layout, mode, marks=pytest.mark.slow)
            for processes, layout in (
                (2, "replicated"), (2, "zero1"), (2, "zero2"), (2, "fsdp=2"), (2, "tp=2"), (4, "fsdp=2,tp=2"),
            )
            for mode in ("none", "selective", "every=2")
        ),
    ],
)  # fmt: skip
def test_offloaded_activations_train_the_same_student(processes, layout, mode, student, tmp_path_factory):
    plain, offloaded = (Training(student, tmp_path_factory.mktemp(name)) for name in ("plain", "offloaded"))
    settings = replace(plain.train, epochs=1, dropout=0.1, checkpointing=mode)
    plain, job = (replace(each, train=replace(settings, offload=kind))
                  for each, kind in ((plain, "none"), (offloaded, "activations")))  # fmt: skip
    expected = run_ranks(train, processes, processes, plain, layout, limit=120)
    for found, plain_result in zip(
        run_ranks(train_and_count, processes, processes, job, layout, limit=120), expected, strict=True
    ):
        assert found["sizes"]
        assert found["weights"].keys() == plain_result["weights"].keys()
        assert all(torch.equal(found["weights"][name], value) for name, value in plain_result["weights"].items())
