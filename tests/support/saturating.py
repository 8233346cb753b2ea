"""Runs commands on a processor whose int8 products saturate: this one, or one emulated by qemu-user."""

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
    """Returns the command prefix for such a processor; skips the test if there is none."""
    if products_saturate():
        return []
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or platform.machine() != "x86_64":
        pytest.skip("needs an x86 processor without VNNI, or qemu-user to emulate one")
    return [emulator, "-cpu", "max"]  # everything that qemu supports: AVX2, but no AVX-512 or VNNI


def python_without_vnni(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*without_vnni(), sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=600)
