"""The benchmark of a decoder's next token: its table."""

import argparse
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common.timing import COPYING
from benchmarks.quantization import decoder_speed

SECONDS = {"float32": 0.04, "int8-dynamic": 0.02, "int8-groups": 0.01, "int4-groups": 0.01}  # of a token


def create_folder(options: argparse.Namespace, scheme: str, folder: Path) -> Path:
    created = folder / (scheme or decoder_speed.FLOAT)
    created.mkdir()
    return created


@pytest.mark.parametrize(
    ("schemes", "expected"),
    [
        (
            ["int8-groups", "int8-dynamic"],
            {"float32": ("1.00", "0.50"), "int8-groups": ("4.00", "2.00"), "int8-dynamic": ("2.00", "1.00")},
        ),
        (["int4-groups"], {"float32": ("1.00", ""), "int4-groups": ("4.00", "")}),
    ],
)
def test_speeds_are_over_float32_and_over_dynamic_int8(schemes, expected, monkeypatch, capsys):
    monkeypatch.setattr(decoder_speed, "write_decoder", create_folder)
    monkeypatch.setattr(decoder_speed, "prepare_step", lambda folder, length: None)
    monkeypatch.setattr(
        decoder_speed, "time_in_turns", lambda steps, *_, **__: {name: [SECONDS[name]] for name in steps}
    )
    monkeypatch.setattr(sys, "argv", ["decoder_speed", "--schemes", *schemes])
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    decoder_speed.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert COPYING in printed
    rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in printed.splitlines() if line.startswith("│")]
    assert {name: (floats, eight_bits) for name, _, _, floats, eight_bits, _ in rows} == expected
