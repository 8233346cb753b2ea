"""Two machines that share no folder train together, with their output in an object store."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load
from torch import Tensor

from pipelines.runs.storage.remote import CACHE_VARIABLE
from support.commands import ROOT, run_to_success, small_run
from support.run_inputs import make_inputs
from support.run_outputs import read_weights, weights_that_differ
from support.services.environments import shared_folder
from support.services.object_store import connected_store, wait_for_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = (
    *("--train.dropout", "0", "--teacher_train.dropout", "0", "--until", "distill", "--epochs", "30"),
    *("--train.checkpoint_every", "10", "--accelerator", "cpu", "--data.max_length", "32", "--patience", "30"),
)
LAYOUTS = {"replicated": (), "sharded": ("--student.layout", "fsdp=2")}
NEAR = 1e-5


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with connected_store(shared_folder(tmp_path_factory, "moto-environment")) as client:
        yield client


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(inputs, layout, tmp_path_factory) -> dict[str, Tensor]:
    """The weights of the student that two processes of one machine train."""
    output = tmp_path_factory.mktemp("one") / "run"
    run_to_success("distill", small_run(*inputs, output, *SETTINGS, *LAYOUTS[layout], "--devices", "2"))
    return read_weights(output)


@contextmanager
def two_machines(arguments: Sequence[str], caches: Path) -> Iterator[list[subprocess.Popen]]:
    """Yields the agents of two machines, each with its own folder for copies of what is at URLs."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    agents = []
    for rank in range(2):
        node = ("--nodes", "2", "--rank", str(rank), "--address", address, "--restarts", "0")
        node_command = [sys.executable, "-m", "pipelines.launchers.node", *node, "--", "pipelines.distill", *arguments]
        variables = {CACHE_VARIABLE: str(caches / str(rank)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        agents.append(
            subprocess.Popen(
                node_command,
                cwd=ROOT,
                env=os.environ | variables | {"PYTHONPATH": str(ROOT)},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        )
    try:
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.communicate()


def finish(agents: Sequence[subprocess.Popen]) -> list[str]:
    printed = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)
    return printed


def read_stored_weights(store, bucket: str) -> dict[str, Tensor]:
    (file,) = store.glob(f"{bucket}/run/distill/*/model/model.safetensors")
    return load(store.cat(file))


def test_two_machines_train_the_student_of_one(store, inputs, layout, expected, tmp_path):
    bucket = f"together-{layout}"
    store.mkdir(bucket)
    arguments = small_run(*inputs, f"s3://{bucket}/run", *SETTINGS, *LAYOUTS[layout])
    with two_machines(arguments, tmp_path) as agents:
        finish(agents)
    assert weights_that_differ(read_stored_weights(store, bucket), expected, NEAR) == {}
    assert not store.glob(f"{bucket}/run/.stillroom/objects/*")


def test_a_run_up_to_the_report_is_stored_at_the_url(store, inputs, tmp_path):
    store.mkdir("whole")
    short = ("--until", "report", "--epochs", "2", "--train.recoveries", "1")
    with two_machines(small_run(*inputs, "s3://whole/run", *SETTINGS, *short), tmp_path) as agents:
        printed = finish(agents)
    assert store.exists("whole/run/report.json")
    assert store.glob("whole/run/student/model.safetensors")
    assert store.glob("whole/run/student/onnxruntime/*")
    assert not store.glob("whole/run/.stillroom/objects/*")
    assert "output: s3://whole/run" in printed[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_machines_are_replaced_by_others(number, store, inputs, layout, expected, tmp_path):
    bucket = f"replaced-{layout}-{number.name.lower()}"
    store.mkdir(bucket)
    arguments = small_run(*inputs, f"s3://{bucket}/run", *SETTINGS, *LAYOUTS[layout])
    with two_machines(arguments, tmp_path / "first") as agents:
        wait_for_checkpoint(store, bucket)
        for agent in agents:
            os.killpg(agent.pid, number)
        for agent in agents:
            agent.communicate(timeout=120)
    with two_machines(arguments, tmp_path / "second") as agents:
        printed = finish(agents)
    assert "teacher: already complete, skipped" in printed[0]
    assert "distill: resuming" in printed[0]
    assert weights_that_differ(read_stored_weights(store, bucket), expected, NEAR) == {}


def test_one_machine_goes_on_alone(store, inputs, layout, expected, tmp_path):
    bucket = f"alone-{layout}"
    store.mkdir(bucket)
    arguments = small_run(*inputs, f"s3://{bucket}/run", *SETTINGS)
    with two_machines([*arguments, *LAYOUTS[layout]], tmp_path / "two") as agents:
        wait_for_checkpoint(store, bucket)
        for agent in agents:
            os.killpg(agent.pid, signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path / "one"))
        printed = run_to_success("distill", arguments)
    assert "distill: resuming" in printed
    # One process sums in another order, which hundreds of Adam's steps at a rate of 1e-3 make visible.
    assert weights_that_differ(read_stored_weights(store, bucket), expected, 0.02) == {}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (("--teacher.processes", "1", "--teacher.online", "true"), "teacher.processes"),
        (("--strategy", "deepspeed"), "strategy"),
    ],
)
def test_settings_that_need_a_shared_folder_are_rejected_by_name(settings, name, store, inputs, tmp_path):
    store.mkdir(f"rejected-{name.replace('.', '-')}")
    arguments = small_run(*inputs, f"s3://rejected-{name.replace('.', '-')}/run", *SETTINGS, *settings)
    with two_machines(arguments, tmp_path) as agents:
        printed = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [2, 2], printed
    assert f"expected a folder that all machines share, found a URL together with {name}" in printed[0]
    assert "Traceback" not in printed[0]
