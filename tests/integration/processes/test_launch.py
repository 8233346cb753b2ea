"""Commands that launch themselves as several processes."""

import json
import os
import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from pipelines import distill
from support.commands import rejection_of, run_to_success, small_run
from support.processes.stopping import Running
from support.run_inputs import make_inputs
from support.run_outputs import read_weights, weights_that_differ

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
    online = ("--teacher.online", "true", "--epochs", "2", "--teacher_train.epochs", "1", "--until", "distill")
    shared_process = small_run(*inputs, tmp_path / "beside", *online, "--devices", "2")
    own_process = small_run(*inputs, tmp_path / "apart", *online, "--devices", "3", "--teacher.processes", "1")
    run_to_success("distill", shared_process)
    assert run_to_success("distill", own_process).count("Stages") == 1, "the teacher's process speaks too"
    ours, theirs = read_weights(tmp_path / "apart"), read_weights(tmp_path / "beside")
    assert weights_that_differ(ours, theirs, 0) == {}
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
        running = Running.of("distill", arguments, fresh=True)
        done += kill_now_and_then(running, rng, kills - done)
        assert running.end() == 0, running.output
        assert weights_that_differ(read_weights(output), theirs, 0) == {}, f"after {done} kills"
        if done == kills:
            return
    pytest.fail(f"{done} of {kills} kills hit a process")


def kill_now_and_then(running: Running, rng: random.Random, max_kills: int) -> int:
    """Kills a random worker every few lines until the run ends or `max_kills` were killed; returns their number."""
    done = 0
    while done < max_kills:
        line = len(running.lines) + rng.randint(1, 12)
        running.wait_for(lambda line=line: len(running.lines) >= line or has_ended(running), "line", alive=False)
        if has_ended(running):
            break
        with suppress(ProcessLookupError, IndexError):  # it has just ended, or all are being restarted
            os.kill(rng.choice(list_workers(running.process.pid)), signal.SIGKILL)
            done += 1
    return done


def has_ended(running: Running) -> bool:
    return running.process.poll() is not None


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
def test_an_invalid_layout_is_rejected_before_processes_start(
    arguments, expected, inputs, tmp_path, monkeypatch, capsys
):
    message = rejection_of(distill, small_run(*inputs, tmp_path / "run", *arguments), monkeypatch, capsys)
    assert expected in message
    assert not (tmp_path / "run").exists()
