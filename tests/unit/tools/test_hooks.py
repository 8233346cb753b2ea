"""The pre-commit hooks run what `make check` runs."""

import subprocess

import yaml

from support.commands import ROOT


def test_the_hooks_run_the_commands_of_make_check():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    listed = subprocess.run(
        ["make", "--dry-run", "--old-file=.venv/ready-dev", "check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert hooks == [line for line in listed.stdout.splitlines() if line.startswith(".venv/")]
    assert len(hooks) == 6
