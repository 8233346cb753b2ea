"""Trainings on several processes stop at the same step, and the cause of a stop or failure is the last line."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest

from support.commands import run_to_success, small_run
from support.processes.stopping import Running, assert_stopped, is_running
from support.run_inputs import make_inputs
from support.run_outputs import read_weights, weights_that_differ

TWO = ("--devices", "2", "--student.layout", "fsdp=2", "--until", "distill", "--epochs", "20")
TWO = (*TWO, "--teacher_train.epochs", "1", "--train.dropout", "0.1", "--train.checkpoint_every", "1000")
RESTARTS = ("--machine.restarts", "5")
EPOCH = "student: distilling: epoch 2/20"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def list_ranks(running: Running) -> list[int]:
    """Returns the process ids of the launched processes, ordered by rank."""
    return sorted(running.children("-m pipelines.distill"), key=rank_of)


def rank_of(pid: int) -> int:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(each.partition(b"=")[2]) for each in environ if each.startswith(b"RANK="))


def list_checkpoints(output: Path) -> list[str]:
    return [file.name for file in output.glob("distill/*.partial/scratch/checkpoints/*")]


def test_stopping_all_or_one_process_leaves_checkpoints_that_resume_bit_identically(inputs, tmp_path):
    arguments, output = small_run(*inputs, tmp_path / "stopped", *TWO, *RESTARTS), tmp_path / "stopped"
    run_to_success("distill", small_run(*inputs, tmp_path / "undisturbed", *TWO))
    first = Running.of("distill", arguments)
    first.wait_for_line(EPOCH)
    assert first.stop(signal.SIGINT) == 130
    assert_stopped(first, "Ctrl-C (SIGINT)")
    (checkpoint,) = list_checkpoints(output)
    assert checkpoint.endswith(".ckpt")
    second = Running.of("distill", arguments)
    second.wait_for_line("distill: resuming")
    second.wait_for_line("student: distilling: epoch")
    started = list_ranks(second)
    os.kill(started[1], signal.SIGTERM)
    assert second.end() == 143
    assert_stopped(second, "SIGTERM")
    assert "restarting" not in second.output
    assert not [pid for pid in started if is_running(pid)]
    (later,) = list_checkpoints(output)
    assert later > checkpoint
    run_to_success("distill", arguments)
    assert weights_that_differ(read_weights(output), read_weights(tmp_path / "undisturbed"), 0) == {}


def test_a_second_ctrl_c_ends_processes_that_wait_for_a_hanging_one(inputs, tmp_path):
    running = Running.of("distill", small_run(*inputs, tmp_path / "run", *TWO, *RESTARTS))
    running.wait_for_line(EPOCH)
    started = list_ranks(running)
    os.kill(started[1], signal.SIGSTOP)
    running.process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert running.process.poll() is None, "the first one waits for a checkpoint"
    assert running.stop(signal.SIGINT) == 130
    assert_stopped(running, "Ctrl-C (SIGINT)")
    assert not [pid for pid in started if is_running(pid)]


def test_the_error_of_the_failed_process_is_the_last_line(inputs, tmp_path):
    more = ("--train.checkpoint_every", "3")
    running = Running.of("distill", small_run(*inputs, tmp_path / "run", *TWO, *more))
    running.wait_for_line(EPOCH)
    resource.prlimit(list_ranks(running)[1], resource.RLIMIT_FSIZE, (16, 16))  # rank 1 can't write its checkpoint
    assert running.end() not in (0, 143)
    assert "File too large" in running.lines[-1], running.output
    assert "lost the others" not in running.output


def test_a_teacher_on_separate_processes_stops_after_the_checkpoint(inputs, tmp_path):
    output = tmp_path / "run"
    options = ("--devices", "2", "--teacher.processes", "1", "--teacher.online", "true", "--epochs", "20")
    options = (*options, "--teacher_train.epochs", "1", "--until", "distill", *RESTARTS)
    running = Running.of("distill", small_run(*inputs, output, *options, "--train.checkpoint_every", "1000"))
    running.wait_for_line(EPOCH)
    before = list_checkpoints(output)
    assert running.stop(signal.SIGTERM) == 143
    assert_stopped(running, "SIGTERM")
    (checkpoint,) = list_checkpoints(output)
    assert [checkpoint] > before
