"""benchmarks.gpu: its commands, what it keeps of them, and its page."""

import argparse
import importlib
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import PIECES, Piece
from benchmarks.quantization.gpu_exports import main as measure_exports
from support.processes.stopping import is_running


class ParsedError(Exception):
    """Ends a benchmark after its arguments were parsed."""


@pytest.mark.parametrize("name", [name for name, piece in PIECES.items() if piece.arguments.startswith("benchmarks.")])
def test_a_piece_is_a_command_that_exists(name: str, monkeypatch: pytest.MonkeyPatch):
    module, *arguments = PIECES[name].arguments.format(output="runs/gpu").split()
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(ParsedError):
        importlib.import_module(module).main()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces that need no GPU: one prints a line, the other's module doesn't exist."""
    pieces = {
        "works": Piece("A title", "What it shows.", "calendar 2026 1"),
        "fails": Piece("B", "-", "no.such.module"),
    }
    monkeypatch.setattr(gpu, "PIECES", pieces)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Returns the exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as exit_error:
        gpu.main()
    return int(exit_error.value.code or 0)


def test_a_failed_piece_is_reported_and_the_others_are_kept_on_the_page(
    pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "gpu.md"
    page.write_text("# Old\n\n## Conclusions\n\nBy hand.\n")
    assert call(monkeypatch, "--output", str(tmp_path / "out"), "--page", str(page)) == 1
    printed = capsys.readouterr().out
    assert "fails: ended with exit code 1; see" in printed
    assert "no.such.module" in (tmp_path / "out" / "fails.log").read_text()
    written = page.read_text()
    assert "## A title" in written
    assert "Some GPU, " in written
    assert "January 2026" in written
    assert "## B" not in written
    assert "# Old" not in written
    assert written.endswith("\n## Conclusions\n\nBy hand.\n")


def test_a_finished_piece_is_not_run_again(
    pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert call(monkeypatch, "--output", str(tmp_path), "--pieces", "works") == 0
    (tmp_path / "works.txt").write_text("kept")
    assert call(monkeypatch, "--output", str(tmp_path), "--pieces", "works") == 0
    assert (tmp_path / "works.txt").read_text() == "kept"
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path), "--dry-run"])
    capsys.readouterr()
    gpu.main()
    assert capsys.readouterr().out == "python -m no.such.module\n"


def test_a_piece_ends_at_its_limit_with_the_processes_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "slow_parent.py").write_text(
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\nchild.wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "PIECES", {"slow": Piece("C", "-", "slow_parent")})
    assert call(monkeypatch, "--output", str(tmp_path / "out"), "--pieces", "slow", "--longest", "3") == 1
    assert "slow: took more than 3 s" in capsys.readouterr().out
    child, end = int((tmp_path / "out" / "slow.txt").read_text()), time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < end, "the piece's own process is left"
        time.sleep(0.05)


def test_the_command_that_ran_is_kept(pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "PIECES", {"works": Piece("A title", "-", "calendar --encoding TEACHER 2026 1")})
    page = tmp_path / "gpu.md"
    arguments = ["--output", str(tmp_path / "out"), "--model", "utf-8", "--page", str(page)]
    assert call(monkeypatch, *arguments, "--pieces", "works") == 0
    assert "$ python -m calendar --encoding utf-8 2026 1\n" in page.read_text()


def test_without_a_gpu_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="expected a GPU"):
        gpu.main()


def test_exports_keep_the_logits_of_their_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    options = "--device cpu --layers 1 --width 64 --rounds 1 --length 8 --compiled --schemes int8-weights"
    monkeypatch.setattr(sys, "argv", ["gpu_exports", *options.split()])
    measure_exports()
    rows = {line.split("│")[1].strip(): line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert float(rows["float32"][-2]) < 1e-5
    assert float(rows["int8-weights"][-2]) < 1e-3
    assert float(rows["bfloat16"][-2]) > 1e-3
