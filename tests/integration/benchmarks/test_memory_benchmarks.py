"""The benchmarks of activation checkpointing and offload, of windows, segments and optimizers, on tiny models."""

import re
import sys

import pytest
import torch

from benchmarks.distributed import segments
from benchmarks.memory import activations, backward_window
from benchmarks.training import optimizers


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
