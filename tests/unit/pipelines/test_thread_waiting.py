"""Tests of how long the threads of a command wait by spinning."""

import os
import subprocess
import sys

import pytest

from support.commands import ROOT


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_commands_limit_spinning_before_torch_is_imported_unless_the_user_sets_it(variables, expected):
    script = "import pipelines, os, sys; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=inherited | variables, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", expected]
