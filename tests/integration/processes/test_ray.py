"""Processes that Ray starts: the same student as torchrun's, also after a worker was killed."""

import os
import signal
import time
from pathlib import Path

import pytest

from distill.errors import InputError
from pipelines.runs.ray_launcher import FAILURE, exit_with_message, name_storage, print_file
from pipelines.runs.stops import list_descendants
from support.commands import run_to_success, small_run, start
from support.processes.stopping import wait_for_checkpoint
from support.run_inputs import make_inputs
from support.run_outputs import student_hash

WORKER = b"ray::"  # how Ray names the processes of its workers
SETTINGS = ("--devices", "2", "--train.dropout", "0", "--teacher_train.dropout", "0", "--until", "distill")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected(inputs, tmp_path_factory) -> str:
    """The hash of the student that two processes of torchrun train."""
    output = tmp_path_factory.mktemp("torchrun") / "run"
    run_to_success("distill", small_run(*inputs, output, *SETTINGS))
    return student_hash(output)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_trains_the_student_of_torchrun(inputs, expected, tmp_path):
    output = tmp_path / "run"
    printed = run_to_success("distill", small_run(*inputs, output, *SETTINGS, "--launcher", "ray"), fresh=True)
    assert student_hash(output) == expected
    assert "student: distilling: epoch" in printed
    assert not name_storage(output).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_worker_is_started_again_and_resumes(inputs, expected, tmp_path):
    output = tmp_path / "run"
    settings = (*SETTINGS, "--launcher", "ray", "--machine.restarts", "2", "--train.checkpoint_every", "2")
    process = start("distill", small_run(*inputs, output, *settings), fresh=True)
    wait_for_checkpoint(output)
    os.kill(find_worker(process.pid), signal.SIGKILL)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert "distill: resuming" in printed
    assert student_hash(output) == expected


def find_worker(command: int) -> int:
    """Returns a process of the second worker's name: the one that trains, not one of Ray's own."""
    for process in list_descendants(command):
        name = Path(f"/proc/{process}/cmdline").read_bytes()
        if name.startswith(WORKER) and b"RayTrainWorker" in name:
            return process
    raise AssertionError("Ray has no worker that trains")


def test_lines_are_printed_as_a_file_grows(tmp_path, capsys):
    file = tmp_path / "output.txt"
    with print_file(file):
        file.write_text("first line\nhalf")
        printed, until = "", time.monotonic() + 60
        while not printed and time.monotonic() < until:
            time.sleep(0.05)
            printed = capsys.readouterr().out
        assert printed == "first line\n"
        with file.open("a") as more:
            more.write(" of the second\nand an end without a line break")
    assert capsys.readouterr().out == "half of the second\nand an end without a line break"


@pytest.mark.parametrize(("is_known", "code"), [(True, 2), (False, 1)])
def test_the_message_of_a_worker_ends_the_command(is_known, code, tmp_path, capsys):
    file = tmp_path / FAILURE
    if is_known:
        file.write_text('{"message": "data: expected 2 columns, found 1"}')
    with pytest.raises(SystemExit) as exit_error:
        exit_with_message(file, InputError("lost"), 3)
    assert exit_error.value.code == code
    message = capsys.readouterr().err
    assert message.startswith("error: data: expected" if is_known else "error: the workers failed 4 times")
