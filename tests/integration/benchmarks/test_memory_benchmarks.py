"""The benchmarks of memory, of segments and of optimizers, on tiny models."""

import argparse
import json
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.distributed import segments
from benchmarks.memory import activations, backward_window, fused_loss
from benchmarks.memory.memory_limits import Outcome, run_worker
from benchmarks.training import optimizers
from pipelines.runs.console import Console


def run(module, capsys, monkeypatch, *arguments: str) -> dict[str, list[str]]:
    """Returns the cells of each row of the printed table."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()
    torch.set_num_threads(threads)
    rows = [re.split(r"\s*[│|]\s*", line.strip("│| ")) for line in capsys.readouterr().out.splitlines()]
    return {name: cells for name, *cells in rows if cells}


def test_checkpointed_steps_equal_the_plain_one_and_hold_less(capsys, monkeypatch):
    sizes = ["--width", "128", "--layers", "3", "--vocabulary", "500", "--rows", "2", "--length", "128"]
    table = run(activations, capsys, monkeypatch, *sizes, "--rounds", "1", "--threads", "1")
    assert table.keys() >= {*activations.MODES, *activations.OFFLOADED, activations.ALL_LOGITS}
    assert all(float(table[mode][-1]) == 0 for mode in (*activations.MODES, *activations.OFFLOADED))
    assert float(table["full"][1]) < float(table["selective"][1]) < float(table["none"][1]) == 1
    assert float(table["none, offloaded"][1]) < 0.6


def test_windows_hold_less_than_the_whole_document(capsys, monkeypatch):
    sizes = ["--width", "128", "--layers", "2", "--vocabulary", "500", "--lengths", "512", "--windows", "0", "64"]
    monkeypatch.setattr(sys, "argv", ["backward_window", *sizes, "--rounds", "1", "--threads", "1"])
    threads = torch.get_num_threads()
    backward_window.main()
    torch.set_num_threads(threads)
    cells = [re.findall(r"[\w.,]+", line) for line in capsys.readouterr().out.splitlines()]
    table = {line[1]: line for line in cells if line and line[0] == "512"}
    assert table.keys() == {"whole", "64"}
    assert float(table["64"][3]) < 0.6 < float(table["whole"][3]) == 1


@pytest.mark.slow
def test_segments_hold_less_than_whole_documents(capsys, monkeypatch):
    sizes = ["--width", "128", "--layers", "2", "--vocabulary", "500", "--lengths", "512", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["segments", *sizes])
    segments.main()
    cells = [re.split(r"\s*[│|]\s*", line.strip("│| ")) for line in capsys.readouterr().out.splitlines()]
    shares = {(line[1], line[2]): float(line[4]) for line in cells if line[0] == "512"}
    assert shares.keys() == {(logits, count) for logits in (segments.BLOCKS, segments.ALL_LOGITS) for count in "12"}
    assert shares[segments.ALL_LOGITS, "1"] == shares[segments.BLOCKS, "1"] == 1
    assert shares[segments.ALL_LOGITS, "2"] < 0.7
    assert shares[segments.BLOCKS, "2"] < 0.7


def test_states_are_counted_for_each_parameter(capsys, monkeypatch):
    names = ["--names", "sgd", "lion", "apollo", "adafactor", "--rounds", "1", "--threads", "1"]
    table = run(optimizers, capsys, monkeypatch, *names, "--hidden", "128", "--layers", "2")
    bytes_of = {name: float(table[name][0]) for name in ("adamw", "sgd", "lion", "apollo", "adafactor")}
    assert bytes_of["adamw"] == 8
    assert bytes_of["sgd"] == bytes_of["lion"] == 4
    assert bytes_of["apollo"] < 5
    assert bytes_of["adafactor"] < 0.5


def test_the_teachers_head_is_a_fourth_product_of_the_dense_loss(capsys, monkeypatch):
    monkeypatch.setattr(fused_loss, "measure_alone", lambda options, name: 1_000_000)
    monkeypatch.setattr(fused_loss, "measure_peak_flops", lambda *_: 1e9)
    monkeypatch.setenv("COLUMNS", "200")
    sizes = {"positions": [64], "vocabulary": 500, "width": 100, "ids": 4, "rounds": 1, "threads": 1, "device": "cpu"}
    fused_loss.compare(argparse.Namespace(**sizes), Console())
    rows = [re.split(r"\s*[│|]\s*", line.strip("│| ")) for line in capsys.readouterr().out.splitlines()]
    bounds = {name: float(cells[2]) for name, *cells in rows if len(cells) == 6 and name != "loss"}
    assert bounds == {fused_loss.DENSE: 25.6, "sparse": 19.2, "fused": 19.2}


@pytest.mark.parametrize(
    "message",
    ["MemoryError", "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"],
)
def test_a_training_that_ran_out_of_memory_has_no_outcome(message, monkeypatch):
    end_with(monkeypatch, 1, "", f"Traceback (most recent call last):\n{message}\n")
    assert run_worker(1, "auto") is None


def test_a_training_that_failed_otherwise_is_no_result_of_a_limit(monkeypatch):
    end_with(monkeypatch, 1, "", "Traceback (most recent call last):\nKeyError: 'VmPeak'\n")
    with pytest.raises(RuntimeError, match="(?s)ended with exit code 1:.*KeyError: 'VmPeak'"):
        run_worker(1, "auto")
    outcome = {"losses": [0.5], "parts": 2, "peak": 3}
    end_with(monkeypatch, 0, f"something else\n{json.dumps(outcome)}\n", "")
    assert run_worker(1, "auto") == Outcome(**outcome)


def end_with(monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code, out, err))
