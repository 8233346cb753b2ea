"""The task that `launch skypilot` writes, read by SkyPilot itself, which needs neither a cloud nor a server for it."""

import copy
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from pipelines.launch import main
from support.services.environments import make_environment, shared_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGES = ("skypilot==0.14.1",)  # moves click to 8.1.8
READ = """\
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(found,) = task.resources
print(json.dumps({
    "nodes": task.num_nodes, "run": task.run, "setup": task.setup, "workdir": task.workdir,
    "cpus": found.cpus, "memory": found.memory, "accelerators": found.accelerators, "spot": found.use_spot,
    "recovery": found.job_recovery, "mounts": {place: each.source for place, each in task.storage_mounts.items()},
}))
"""


@pytest.fixture(scope="module")
def skypilot(tmp_path_factory) -> Path:
    return make_environment(shared_folder(tmp_path_factory, "skypilot-environment"), PACKAGES)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict:
    """A task with all fields that are written for SkyPilot."""
    folder = tmp_path_factory.mktemp("launch")
    options = ("--nodes=2", "--gpus=8", "--accelerator=H100", "--spot=true", f"--output={folder}")
    main(["skypilot", *options, "--volume=s3://bucket", "--", "distill", "--output", "/shared/runs/it's here"])
    return yaml.safe_load((folder / "task.yaml").read_text())


def read_task(skypilot: Path, task: dict, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    variables = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "HOME": str(folder)}
    command = [skypilot, "-c", READ, folder / "task.yaml"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False)


def test_skypilot_reads_what_was_requested(skypilot, task, tmp_path):
    done = read_task(skypilot, task, tmp_path)
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout.splitlines()[-1])
    assert fields["nodes"] == 2
    assert (fields["cpus"], fields["memory"], fields["accelerators"], fields["spot"]) == (
        "4+",
        "15+",
        {"H100": 8},
        True,
    )
    assert fields["recovery"].items() >= {"max_restarts_on_errors": 10, "recover_on_exit_codes": [75]}.items()
    assert fields["mounts"] == {"/shared": "s3://bucket"}
    assert (fields["run"], fields["setup"], fields["workdir"]) == (task["run"], task["setup"], ".")


@pytest.mark.parametrize(
    ("group", "field", "wrong"),
    [
        ("", "num_nodes", "num_node"),
        ("resources", "accelerators", "acelerators"),
        ("resources", "job_recovery", "job_recover"),
        ("", "file_mounts", "file_mount"),
    ],
)
def test_a_misspelt_field_is_found(group, field, wrong, skypilot, task, tmp_path):
    """The check above would be worth nothing otherwise."""
    changed = copy.deepcopy(task)
    fields = changed[group] if group else changed
    fields[wrong] = fields.pop(field)
    done = read_task(skypilot, changed, tmp_path)
    assert done.returncode != 0
    assert wrong in done.stderr
