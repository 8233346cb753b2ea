"""Hashes of files and weights are computed by one process of each machine and handed to the others."""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

from distill.teacher.fingerprint import weights_fingerprint
from pipelines.runs.processes import World
from support.processes.ranks import run_ranks
from support.tiny_models import build_model


def world_on_machines(folder: Path, rank: int, processes: int, per_machine: int) -> World:
    os.environ["LOCAL_RANK"] = str(rank % per_machine)
    return World(rank, processes, dist.FileStore(str(folder / "store"), processes))


def compute_once(rank: int, folder: Path) -> tuple[list[str], int]:
    world, calls = world_on_machines(folder, rank, 4, 2), 0

    def compute() -> str:
        nonlocal calls
        calls += 1
        return f"computed by {rank}"

    return [world.compute_once(compute) for _ in range(2)], calls


def test_the_first_process_of_each_machine_computes_for_the_others(tmp_path):
    results = run_ranks(compute_once, 4, tmp_path)
    assert [values[0] for values, _ in results] == ["computed by 0"] * 2 + ["computed by 2"] * 2
    assert [calls for _, calls in results] == [2, 0, 2, 0]


def test_a_single_process_computes_its_own_value():
    assert World().compute_once(lambda: "own") == "own"


def test_a_fingerprint_that_is_not_kept_hashes_nothing(monkeypatch):
    model, hashed = build_model("bert"), []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data=b"": hashed.append(data) or sha256(data))
    assert weights_fingerprint(model, keep=False) == ""
    assert not hashed
    first = weights_fingerprint(model)
    with torch.no_grad():
        next(model.parameters()).flatten()[0] += 1
    assert weights_fingerprint(model) != first
