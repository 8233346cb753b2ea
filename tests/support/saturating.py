"""Runs commands on a processor whose products of bytes saturate: this one, or one that qemu-user emulates."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

from compress.export.onnx.int8 import products_saturate
from support.commands import ROOT


def without_vnni() -> list[str]:
    """Words before a command; the test is skipped where there is no such processor."""
    if products_saturate():
        return []
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or platform.machine() != "x86_64":
        pytest.skip("needs an x86 processor without VNNI, or qemu-user to emulate one")
    return [emulator, "-cpu", "max"]  # all that it knows: AVX2, and no AVX-512 or VNNI


def python_without_vnni(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*without_vnni(), sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=600)
