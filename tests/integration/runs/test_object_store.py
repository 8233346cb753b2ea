"""A run with data, teacher and output in an object store: killed, resumed elsewhere, damaged, without permission."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipelines.runs.storage.remote import CACHE_VARIABLE
from support.commands import ROOT, command, run_to_success, small_run
from support.run_inputs import make_inputs
from support.services.environments import shared_folder
from support.services.object_store import connected_store, object_store, wait_for_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = ("--train.checkpoint_every", "5", "--epochs", "30", "--until", "distill", "--accelerator", "cpu")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    return shared_folder(tmp_path_factory, "moto-environment")


@pytest.fixture(scope="module")
def store(environment):
    with connected_store(environment) as client:
        yield client


@pytest.fixture(scope="module")
def inputs(store, tmp_path_factory) -> tuple[str, str]:
    """URLs of a teacher and of data."""
    store.mkdir("inputs")
    for folder in make_inputs(tmp_path_factory.mktemp("inputs")):
        store.put(str(folder), f"inputs/{folder.name}", recursive=True)
    return "s3://inputs/teacher", "s3://inputs/data"


@pytest.fixture(scope="module")
def expected(inputs, tmp_path_factory) -> bytes:
    """The weights of a run on this machine alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        output = tmp_path_factory.mktemp("here") / "run"
        run_to_success("distill", small_run(*inputs, output, *SETTINGS), fresh=True)
    (file,) = output.glob("distill/*/model/model.safetensors")
    return file.read_bytes()


def start(arguments: list[str], cache: Path) -> subprocess.Popen:
    variables = os.environ | {CACHE_VARIABLE: str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command("distill", *arguments), cwd=ROOT, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_goes_on_on_another_machine(number, store, inputs, expected, tmp_path):
    bucket = f"killed-{number.name.lower()}"
    store.mkdir(bucket)
    arguments = small_run(*inputs, f"s3://{bucket}/run", *SETTINGS)
    first = start(arguments, tmp_path / "first")
    wait_for_checkpoint(store, bucket)
    first.send_signal(number)
    first.communicate(timeout=120)
    assert first.returncode == (143 if number == signal.SIGTERM else -9)
    second = start(arguments, tmp_path / "second")  # with nothing in its cache
    printed, _ = second.communicate(timeout=300)
    assert second.returncode == 0, printed
    assert "teacher: already complete, skipped" in printed
    assert "distill: resuming" in printed
    (file,) = store.glob(f"{bucket}/run/distill/*/model/model.safetensors")
    assert store.cat(file) == expected


def test_a_damaged_object_is_named(store, inputs, tmp_path):
    store.mkdir("damaged")
    arguments = small_run(*inputs, "s3://damaged/run", *SETTINGS, "--epochs", "1")
    assert start(arguments, tmp_path / "first").wait(300) == 0
    (file,) = store.glob("damaged/run/teacher/*/model/model.safetensors")
    content = bytearray(store.cat(file))
    content[-1] ^= 1
    store.pipe(file, bytes(content))
    second = start(arguments, tmp_path / "second")
    printed, _ = second.communicate(timeout=300)
    assert second.returncode == 2
    assert f"error: output 's3://{file}': expected SHA-256" in printed
    assert "Traceback" not in printed


def test_a_bucket_that_does_not_exist_is_named(store, inputs, tmp_path):
    process = start(small_run(*inputs, "s3://no-such-bucket/run"), tmp_path / "cache")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 2, printed
    assert "error: output 's3://no-such-bucket/run" in printed
    assert "Traceback" not in printed


def test_data_without_permission_to_read_it_is_rejected_by_name(environment, tmp_path, monkeypatch):
    with object_store(environment, INITIAL_NO_AUTH_ACTION_COUNT="0") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        process = start(small_run("s3://private/teacher", "s3://private/data", tmp_path / "run"), tmp_path / "cache")
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 2, printed
    assert "error: data.path 's3://private/data': no permission" in printed


def test_a_server_that_does_not_answer_ends_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    start_time = time.monotonic()
    process = start(small_run("s3://away/teacher", "s3://away/data", tmp_path / "run"), tmp_path / "cache")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 2, printed
    assert "error: data.path 's3://away/data'" in printed
    assert time.monotonic() - start_time < 120
