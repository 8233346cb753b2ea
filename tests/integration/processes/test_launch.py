"""Commands that launch themselves as several processes."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipelines import distill
from support.commands import refusal_of, run_to_success, small_run, start
from support.run_inputs import make_inputs

TWO = (
    "--devices",
    "2",
    "--until",
    "distill",
    "--machine.restarts",
    "25",
    "--epochs",
    "4",
    "--teacher_train.epochs",
    "1",
)
OFTEN = ("--train.checkpoint_every", "3", "--teacher_train.checkpoint_every", "3", "--train.dropout", "0.1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def read_weights(output: Path) -> dict:
    return load_file(next(output.glob("distill/*/model/model.safetensors")))


def list_workers(parent: int) -> list[int]:
    """Process ids of the workers that a launcher started."""
    pids = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in pids.split()]


@pytest.fixture(scope="module")
def undisturbed_run(inputs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("two") / "run"
    message = run_to_success("distill", small_run(*inputs, output, *TWO, *OFTEN, "--student.layout", "fsdp=2"))
    assert message.count("Stages") == 1, "both processes speak"
    return output


@pytest.mark.slow
def test_two_processes_write_all_stages_and_the_student(undisturbed_run):
    stages = {
        file.parent.parent.name: json.loads(file.read_text()) for file in undisturbed_run.glob("*/*/manifest.json")
    }
    assert stages.keys() == {"data", "teacher", "cache", "distill"}
    assert {stage["processes"] for stage in stages.values()} == {2}
    assert read_weights(undisturbed_run)


@pytest.mark.slow
def test_a_teacher_on_its_own_process_trains_the_same_student(inputs, tmp_path):
    online = ("--teacher.signals", "online", "--epochs", "2", "--teacher_train.epochs", "1", "--until", "distill")
    shared_process = small_run(*inputs, tmp_path / "beside", *online, "--devices", "2")
    own_process = small_run(*inputs, tmp_path / "apart", *online, "--devices", "3", "--teacher.processes", "1")
    run_to_success("distill", shared_process)
    assert run_to_success("distill", own_process).count("Stages") == 1, "the teacher's process speaks too"
    ours, theirs = read_weights(tmp_path / "apart"), read_weights(tmp_path / "beside")
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert "distill: already complete, skipped" in run_to_success("distill", own_process), (
        "the teacher is called and nobody asks"
    )


@pytest.mark.slow
def test_deepspeed_saves_a_student(inputs, tmp_path):
    arguments = ("--devices", "2", "--strategy", "deepspeed_stage_2", "--epochs", "2", "--teacher_train.epochs", "1")
    assert run_to_success("distill", small_run(*inputs, tmp_path, *arguments)).count("Result") == 1
    assert read_weights(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [2, 20])
def test_a_run_with_killed_workers_ends_with_identical_weights(kills, inputs, undisturbed_run, tmp_path):
    rng, done, theirs = random.Random(0), 0, read_weights(undisturbed_run)
    for number in range(kills):
        output = tmp_path / f"run-{number}"
        arguments = small_run(*inputs, output, *TWO, *OFTEN, "--student.layout", "fsdp=2")
        process = start("distill", arguments, fresh=True)
        done += kill_now_and_then(process, rng, kills - done)
        message, _ = process.communicate(timeout=300)
        assert process.returncode == 0, message
        ours = read_weights(output)
        assert all((ours[name] == theirs[name]).all() for name in theirs), f"after {done} kills"
        if done == kills:
            return
    pytest.fail(f"{done} of {kills} kills hit a process")


def kill_now_and_then(process: subprocess.Popen, rng: random.Random, max_kills: int) -> int:
    """Kills a random worker every few seconds until the run ends or `max_kills` were killed; returns their number."""
    done = 0
    while process.poll() is None and done < max_kills:
        time.sleep(rng.uniform(6, 12))
        workers = list_workers(process.pid)
        if workers and process.poll() is None:
            os.kill(rng.choice(workers), signal.SIGKILL)
            done += 1
    return done


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--devices", "2", "--student.layout", "fsdp=3"), "expected 3 processes, found 2"),
        (("--devices", "2", "--student.layout", "hsdp=2x2"), "expected 2 x 2 = 4 processes, found 2"),
        (("--devices", "8", "--teacher.layout", "tp=8"), "4 attention heads"),
        (("--devices", "4", "--teacher.layout", "fsdp=2,pp=2"), "expected pp with dp only"),
        (("--devices", "2", "--student.layout", "ddp"), "expected replicated"),
        (
            ("--devices", "2", "--student.layout", "fsdp=2", "--machine.gradient_compression", "bf16"),
            "machine.gradient_compression bf16: expected student.layout replicated or zero1, found fsdp=2",
        ),
        (
            ("--devices", "2", "--student.layout", "zero2", "--machine.gradient_compression", "powersgd"),
            "machine.gradient_compression powersgd: expected student.layout replicated or zero1, found zero2",
        ),
        (("--devices", "0"), "machine.devices: expected at least 1, found 0"),
    ],
)
def test_an_invalid_layout_is_refused_before_processes_start(
    arguments, expected, inputs, tmp_path, monkeypatch, capsys
):
    message = refusal_of(distill, small_run(*inputs, tmp_path / "run", *arguments), monkeypatch, capsys)
    assert expected in message
    assert not (tmp_path / "run").exists()
