"""The benchmark of a paired teacher and student step: its interval arithmetic and a run on two processes."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch

from benchmarks.distributed.paired_step import merge_intervals, overlap_length, profile_overlap, total_length
from support.commands import ROOT


def test_overlapping_and_adjacent_intervals_are_merged():
    assert merge_intervals([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert total_length(merge_intervals([(0, 2), (1, 3), (1, 2)])) == 3


@pytest.mark.parametrize(
    ("sending", "working", "expected"),
    [([(0, 2)], [(1, 3)], 1), ([(0, 1)], [(1, 2)], 0), ([(0, 4)], [(1, 2), (3, 5)], 2), ([(1, 2)], [(0, 9)], 1)],
)
def test_overlap_length_is_the_common_length_of_two_interval_lists(sending, working, expected):
    assert overlap_length(sending, working) == expected


@pytest.mark.slow
def test_all_layout_pairs_are_timed_on_two_processes():
    sizes = ["--teacher", "2x128", "--student", "1x128", "--batch", "4", "--length", "16", "--rounds", "2"]
    arguments = [*sizes, "--precision", "32", "bf16", "fp8"]
    pairs = ["replicated/replicated", "replicated/zero2", "fsdp=2/tp=2", "pp=2/zero2"]
    message = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        + ["-m", "benchmarks.distributed.paired_step", *arguments, "--pairs", *pairs],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for pair in pairs:
        assert message.count(f"{pair} 32 ") == message.count(f"{pair} bf16 ") == 1
    assert "fp8: needs a GPU" in message
    cells = [re.split(r"\s*│\s*", line.strip("│ ")) for line in message.splitlines() if line.startswith("│")]
    bounds = {name: bound for name, _, _, bound, *_ in cells}
    assert bounds["pp=2/zero2 32"] == bounds["replicated/zero2 32"], "the teacher's stages together are its whole work"


class SlowProfile:
    """A profile whose start and end take 0.3 seconds each, in which a kernel ran for two steps of 0.05 seconds."""

    def __init__(self, **settings: object):
        pass

    def __enter__(self) -> "SlowProfile":
        time.sleep(0.3)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        time.sleep(0.3)

    def events(self) -> list[Any]:
        span = SimpleNamespace(start=0.0, end=2 * 50e3)
        return [SimpleNamespace(name="gemm", device_type=torch.autograd.DeviceType.CUDA, time_range=span)]


def test_the_start_of_the_profiler_is_no_time_in_which_the_device_is_idle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", SlowProfile)
    busy, hidden = profile_overlap(lambda: time.sleep(0.05))
    assert int(busy.rstrip("%")) > 60
    assert hidden == "none sent"
