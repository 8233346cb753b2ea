"""A run killed by `kill -9` at random moments and restarted ends with a student bit-identical to an undisturbed one."""

import random
import signal
import time

import pytest

from support.commands import run_to_success, small_run, start
from support.run_outputs import student_hash
from support.tiny_models import build_model, saved

# Enough steps with frequent checkpoints for kills to hit every stage.
LONG = ("--epochs", "24", "--teacher_train.epochs", "12", "--train.checkpoint_every", "7")
LONG = (*LONG, "--teacher_train.checkpoint_every", "7", "--train.dropout", "0.1", "--until", "distill")


def kill_after(lines: int, delay: float, arguments: list[str]) -> bool:
    """Starts the command and kills it `delay` seconds after so many lines of output; returns whether it still ran.

    Lines and not seconds: a time means another moment under another load.
    """
    process = start("distill", arguments, fresh=True)
    assert process.stdout is not None
    for _ in zip(range(lines), process.stdout, strict=False):
        pass
    time.sleep(delay)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.fixture
def undisturbed_run(tmp_path, tokenizer, data_folder, monkeypatch):
    """(teacher, data, hash of the student, lines of output before the summary) of an undisturbed run."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    teacher = saved(build_model("bert", "Model"), tokenizer, tmp_path / "teacher")
    message = run_to_success("distill", small_run(teacher, data_folder, tmp_path / "undisturbed", *LONG))
    lines = message.splitlines().index("Stages")
    return teacher, data_folder, student_hash(tmp_path / "undisturbed"), lines


@pytest.mark.slow
def test_a_run_killed_repeatedly_resumes_bit_identically(undisturbed_run, tmp_path):
    teacher, data, expected, lines = undisturbed_run
    output = tmp_path / "killed"
    arguments = small_run(teacher, data, output, *LONG)
    for part in (0.3, 0.4):  # of what is left: a resumed run has fewer lines
        assert kill_after(int(part * lines), 0.0, arguments)
    message = run_to_success("distill", arguments, fresh=True)
    assert "skipped" in message
    assert "resuming" in message
    assert student_hash(output) == expected


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_runs_killed_at_random_moments_end_bit_identically(undisturbed_run, tmp_path):
    teacher, data, expected, lines = undisturbed_run
    chance, hits = random.Random(11), 0
    for number in range(20):
        output = tmp_path / f"killed-{number}"
        arguments = small_run(teacher, data, output, *LONG)
        hits += kill_after(chance.randrange(lines - 4), chance.uniform(0, 0.3), arguments)
        run_to_success("distill", arguments, fresh=True)
        assert student_hash(output) == expected, f"kill {number}"
    assert hits >= 10, "too many runs ended before they were killed"
