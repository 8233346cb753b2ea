"""SIGTERM and Ctrl-C end a command with one line, code 143 or 130 and no process left; it resumes bit-identically."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines import export
from support.commands import ROOT, run_to_success, small_run
from support.processes.stopping import Running, assert_stopped, is_running
from support.run_inputs import make_inputs
from support.run_outputs import student_hash
from support.tiny_models import build_model, saved, word_tokenizer

STOPS = [
    pytest.param(signal.SIGTERM, "SIGTERM", 143, id="SIGTERM"),
    pytest.param(signal.SIGINT, "Ctrl-C (SIGINT)", 130, id="SIGINT"),
]
EPOCHS = ("--epochs", "8", "--teacher_train.epochs", "8", "--train.dropout", "0.1", "--until", "distill")
SELDOM = ("--train.checkpoint_every", "1000", "--teacher_train.checkpoint_every", "1000")
SLOWLY = "import time; from pipelines.runs import cli, stops; cli.run(lambda argv: ({}, print('here', flush=True), {}))"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed_hash(inputs, tmp_path_factory) -> str:
    """The hash of the student of an undisturbed run."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    run_to_success("distill", small_run(*inputs, output, *EPOCHS))
    return student_hash(output)


def list_checkpoints(output: Path, stage: str) -> list[str]:
    return [file.name for file in output.glob(f"{stage}/*.partial/scratch/checkpoints/*.ckpt")]


@pytest.mark.slow
def test_a_training_stopped_twice_resumes_from_its_checkpoints_bit_identically(inputs, undisturbed_hash, tmp_path):
    output = tmp_path / "run"
    arguments = small_run(*inputs, output, *EPOCHS, *SELDOM)
    tuning = Running.of("distill", arguments)
    tuning.wait_for_line("teacher: fine-tuning: epoch 2/8")
    assert tuning.stop(signal.SIGINT) == 130
    assert_stopped(tuning, "Ctrl-C (SIGINT)")
    (checkpoint,) = list_checkpoints(output, "teacher")
    distilling = Running.of("distill", arguments)
    distilling.wait_for_line("student: distilling: epoch 2/8")
    assert distilling.stop(signal.SIGTERM) == 143
    assert_stopped(distilling, "SIGTERM")
    assert "teacher: resuming" in distilling.output
    assert "teacher: fine-tuning: epoch 2/8" not in distilling.output, f"it didn't go on from {checkpoint}"
    (checkpoint,) = list_checkpoints(output, "distill")
    run_to_success("distill", arguments)
    assert student_hash(output) == undisturbed_hash, f"not the same bits after {checkpoint}"


@pytest.mark.parametrize(("number", "name", "code"), STOPS)
def test_a_command_stopped_during_its_imports_prints_one_line(number, name, code, inputs, tmp_path):
    running = Running.of("distill", small_run(*inputs, tmp_path / "run"), fresh=True)
    running.wait_until_watched()
    assert running.stop(number) == code
    assert_stopped(running, name)
    assert len(running.lines) == 1


@pytest.fixture(scope="module")
def export_inputs(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder for outputs, and the arguments of an export without `--output`."""

    folder = tmp_path_factory.mktemp("exported")
    tokenizer = word_tokenizer()
    model = saved(build_model("bert", num_hidden_layers=1), tokenizer, folder / "model")
    texts = folder / "texts.csv"
    texts.write_text("text\n" + "badi goka lume\n" * 20)
    return folder, ["--model", str(model), "--data", str(texts), "--max_length", "32", "--parity", "8"]


@pytest.mark.parametrize(("number", "name", "code"), STOPS)
def test_stopping_a_command_during_verification_ends_the_verifying_process(number, name, code, export_inputs):
    folder, arguments = export_inputs
    running = Running.of("export", [*arguments, "--output", str(folder / f"stopped-{code}")])
    child = running.wait_for_child("export.verify")
    assert running.stop(number) == code
    assert_stopped(running, name)
    assert not is_running(child)


@pytest.mark.slow
def test_a_killed_verification_fails_its_stage_and_the_next_run_completes_it(export_inputs, capsys):
    folder, arguments = export_inputs
    output = folder / "killed"
    running = Running.of("export", [*arguments, "--output", str(output)])
    os.kill(running.wait_for_child("export.verify"), signal.SIGKILL)
    assert running.end() == 2
    assert "Traceback" not in running.output
    assert running.lines[-1].startswith("error: huggingface: the process that verifies ")
    assert "was killed by SIGKILL before it had compared anything" in running.lines[-1]
    assert not list(output.glob("export/*/manifest.json"))
    assert not list(output.glob("export/*/rejected"))
    export.main([*arguments, "--output", str(output)])
    (manifest,) = output.glob("export/*/manifest.json")
    metrics = json.loads(manifest.read_text())["metrics"]
    assert [each["target"] for each in metrics["parity"]] == ["huggingface", "onnx", "onnxruntime"]
    assert "rejected" not in metrics


def test_a_verification_does_not_outlive_a_killed_command(export_inputs):
    folder, arguments = export_inputs
    running = Running.of("export", [*arguments, "--output", str(folder / "orphan")])
    child = running.wait_for_child("export.verify")
    running.process.kill()
    running.process.wait()
    until = time.monotonic() + 120
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(child)


def start_code(before: str, after: str) -> Running:
    """Starts a command that executes `before`, prints "here" and executes `after`, and waits for that line."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    code = SLOWLY.format(before, after)
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    running = Running(process)
    running.wait_for_line("here")
    return running


def test_a_second_ctrl_c_ends_a_command_that_is_still_writing_its_checkpoint():
    running = start_code("stops.defer_stop()", "time.sleep(100)")
    running.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert running.process.poll() is None, "the first one waits for the checkpoint"
    assert running.stop(signal.SIGINT) == 130
    assert_stopped(running, "Ctrl-C (SIGINT)")


def test_a_signal_sent_twice_at_once_counts_as_one_request():
    """`timeout` sends its signal both to the command and to the command's process group."""
    checkpoint = "time.sleep(2), print('a checkpoint', flush=True), stops.raise_if_requested()"
    running = start_code("stops.defer_stop()", checkpoint)
    running.process.send_signal(signal.SIGTERM)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 143
    assert "a checkpoint\n" in running.lines, running.output
    assert_stopped(running, "SIGTERM")


def test_a_command_in_an_endless_loop_is_stopped():
    running = start_code("0", "[time.sleep(0.1) for _ in iter(int, 1)]")
    assert running.stop(signal.SIGTERM) == 143
    assert_stopped(running, "SIGTERM")
