"""A run killed by `kill -9` at random moments and restarted ends with a student bit-identical to an undisturbed one."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from pipelines.runs.stage import sha256
from support.commands import run_to_success, small_run, start
from support.tiny_models import build_model, saved

# Enough steps with frequent checkpoints for kills to hit every stage.
LONG = ("--epochs", "24", "--teacher_train.epochs", "12", "--train.checkpoint_every", "7")
LONG = (*LONG, "--teacher_train.checkpoint_every", "7", "--train.dropout", "0.1", "--until", "distill")


def kill_after(seconds: float, words: list[str]) -> bool:
    """Starts the command and kills it after `seconds`; returns whether it was still running."""
    process = start("distill", words)
    try:
        process.wait(timeout=seconds)
    except Exception:  # still running, as expected
        process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def student_hash(output: Path) -> str:
    return sha256(next(output.glob("distill/*/model/model.safetensors")))


@pytest.fixture
def undisturbed(tmp_path, tokenizer, data_folder):
    """(teacher, data, hash of the student, seconds) of an undisturbed run."""
    teacher = saved(build_model("bert", "Model"), tokenizer, tmp_path / "teacher")
    begun = time.monotonic()
    run_to_success("distill", small_run(teacher, data_folder, tmp_path / "undisturbed", *LONG))
    return teacher, data_folder, student_hash(tmp_path / "undisturbed"), time.monotonic() - begun


@pytest.mark.slow
def test_a_run_killed_repeatedly_resumes_bit_identically(undisturbed, tmp_path):
    teacher, data, expected, seconds = undisturbed
    output = tmp_path / "killed"
    words = small_run(teacher, data, output, *LONG)
    chance, killed = random.Random(3), 0
    for _ in range(8):  # under changing load a kill may come before the first manifest or after the end
        if kill_after(chance.uniform(0.3, 0.9) * seconds, words):
            killed += any(output.glob("*/*/manifest.json"))
            seconds *= 1 if killed else 1.5
        elif not killed:
            shutil.rmtree(output)
            seconds /= 2
        if killed == 2:
            break
    said = run_to_success("distill", words)
    assert killed >= 1
    assert "skipped" in said or "going on" in said
    assert student_hash(tmp_path / "killed") == expected


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_runs_killed_at_random_moments_end_bit_identically(undisturbed, tmp_path):
    teacher, data, expected, seconds = undisturbed
    chance, killed = random.Random(11), 0
    for number in range(40):
        output = tmp_path / f"killed-{number}"
        words = small_run(teacher, data, output, *LONG)
        if kill_after(chance.uniform(0.05, 0.95) * seconds, words):
            killed += 1
        else:
            seconds *= 0.8  # the machine was busier when it was measured
        run_to_success("distill", words)
        assert student_hash(output) == expected, f"run {number}"
        if killed == 20:
            break
    assert killed == 20
