"""The script that `launch slurm` writes, on a Slurm of two nodes: the student of a run without it, also requeued."""

import subprocess
from pathlib import Path

import pytest

from support.commands import command, run_to_success, small_run
from support.processes.stopping import wait_for_checkpoint
from support.run_inputs import make_inputs
from support.run_outputs import student_hash
from support.services.environments import shared_folder
from support.services.slurm import SlurmCluster, find_obstacle, slurm_cluster, unpack_slurm, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SETTINGS = ("--until", "distill", "--epochs", "40", "--train.checkpoint_every", "20", "--accelerator", "cpu")
NODES = ("--nodes", "2", "--cpus", "1", "--memory", "1GB", "--restarts", "2", "--submit")
AT_WORK = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    slurm = shared_folder(tmp_path_factory, "slurm-packages")
    obstacle = find_obstacle() or unpack_slurm(slurm)
    if obstacle:
        pytest.skip(obstacle)
    with slurm_cluster(slurm, tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture(scope="module")
def inputs(cluster, tmp_path_factory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected(inputs, tmp_path_factory) -> str:
    """The hash of the student that two processes train without Slurm."""
    output = tmp_path_factory.mktemp("without") / "run"
    run_to_success("distill", small_run(*inputs, output, *SETTINGS, "--devices", "2"))
    return student_hash(output)


def submit(cluster: SlurmCluster, folder: Path, *arguments: str) -> str:
    """Launches a distillation from a folder, on which its relative paths depend, and returns the job's number."""
    launch_command = command("launch", "slurm", *NODES, "--", "distill", *arguments)
    variables = cluster.variables | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(launch_command, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Submitted batch job "))
    return line.split()[-1]


def finish(cluster: SlurmCluster, folder: Path, job: str) -> str:
    """Waits for a job's end and returns what it printed."""
    wait_until(lambda: cluster.read_job(job)["JobState"] not in AT_WORK, f"end of job {job}", 300)
    printed = (folder / f"slurm-{job}.out").read_text()
    assert cluster.read_job(job)["JobState"] == "COMPLETED", printed
    assert "ended with 0" in printed
    return printed


def test_two_nodes_train_the_student_of_two_processes(cluster, inputs, expected, tmp_path):
    job = submit(cluster, tmp_path, *small_run(*inputs, Path("run"), *SETTINGS))
    printed = finish(cluster, tmp_path, job)
    assert student_hash(tmp_path / "run") == expected
    assert all(f"node {rank} of 2: 1 processes" in printed for rank in range(2))
    assert cluster.read_job(job)["Restarts"] == "0"


# The signal is what Slurm sends to the processes of the nodes before a job's time is over.
@pytest.mark.parametrize(
    "stop_command", [("scontrol", "requeue"), ("scancel", "--signal=TERM")], ids=["requeued", "signal"]
)
def test_a_stopped_job_is_queued_again_and_goes_on_from_its_checkpoint(
    stop_command, cluster, inputs, expected, tmp_path
):
    job = submit(cluster, tmp_path, *small_run(*inputs, Path("run"), *SETTINGS))
    wait_for_checkpoint(tmp_path / "run")
    cluster.call(*stop_command, job)
    printed = finish(cluster, tmp_path, job)
    assert cluster.read_job(job)["Restarts"] == "1"
    assert "stopped by SIGTERM" in printed
    assert "distill: resuming" in printed
    assert student_hash(tmp_path / "run") == expected


def test_invalid_input_ends_the_job(cluster, inputs, tmp_path):
    job = submit(cluster, tmp_path, *small_run(*inputs, Path("run"), "--student", "layers=9"))
    wait_until(lambda: cluster.read_job(job)["JobState"] not in AT_WORK, f"end of job {job}", 120)
    found = cluster.read_job(job)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0")
    assert "error: " in (tmp_path / f"slurm-{job}.out").read_text()
