"""Trainings under a real limit of the address space (RLIMIT_AS) end with the losses of an unlimited one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from support.commands import ROOT

pytestmark = pytest.mark.slow


def run(folder: Path, **limits: int) -> dict:
    """Trains with limits in MiB by step, such as `from2=300`."""
    words = ["[PAD]", "[UNK]", *map(str, range(400))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder / "tokenizer")
    pairs = [f"{name.removeprefix('from')}={mib}" for name, mib in limits.items()]
    # Freed tensors go back to the system, since the limit is one of addresses and not of memory.
    settings = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = os.environ | settings | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-m", "support.limited_training", str(folder), *pairs],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_training_under_a_limit_that_falls_twice_has_the_losses_of_an_unlimited_one(tmp_path):
    unlimited = run(tmp_path / "unlimited")
    assert unlimited["parts"] == 1
    limited = run(tmp_path / "limited", from0=150, from5=60)
    assert limited["parts"] >= 4
    assert limited["losses"] == pytest.approx(unlimited["losses"], abs=1e-5)
