"""Targets of the Makefile name files that exist."""

import subprocess

import pytest

from support.commands import ROOT


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "test-less", "check", "docs", "bench"])
def test_a_target_can_be_expanded(target: str):
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
