"""Each stage of a run is stopped soon after its start, alternately by SIGTERM and Ctrl-C, and then resumed."""

import re
import signal
from itertools import cycle
from pathlib import Path

import pytest

from pipelines.runs.manifest import hash_file
from support.commands import run_to_success, small_run
from support.processes.stopping import Running, assert_stopped
from support.run_inputs import make_inputs

SIGNALS = ((signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C (SIGINT)", 130))
STARTED = re.compile(r"^([\w.-]+): (?:started|resuming) \(", re.M)
SMALLER = ("--budget.precision", "fp32", "--budget.retries", "0", "--prune.trial_steps", "2", "--prune.samples", "16")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def stop_in_each_stage(module: str, arguments: list[str], passed: tuple[str, ...] = ()) -> list[str]:
    """Runs the command until it completes, stopping it once in each stage not in `passed`; returns the stages."""
    stopped = list(passed)
    for number, name, code in cycle(SIGNALS):
        running = Running.of(module, arguments)
        stage = next_stage(running, stopped)
        if stage is None:
            assert running.end() == 0, running.output
            return stopped
        stopped.append(stage)
        exit_code = running.stop(number)
        if exit_code == 0:  # the last stage ended before the signal arrived
            return stopped
        assert exit_code == code, f"{stage}: {running.output}"
        assert_stopped(running, name)
    return stopped


def next_stage(running: Running, stopped: list[str]) -> str | None:
    """Returns the first started stage that wasn't stopped before, or None if the command ends without one."""

    def list_started() -> list[str]:
        return [stage for stage in STARTED.findall(running.output) if stage not in stopped]

    running.wait_for(lambda: list_started() or running.process.poll() is not None, "stage", alive=False)
    return next(iter(list_started()), None)


def test_every_stage_of_a_quantized_run_resumes_bit_identically_after_a_stop(inputs, tmp_path):
    more = ("--epochs", "2", "--teacher_train.epochs", "2", "--quantize", "int8")
    stopped = stop_in_each_stage("distill", small_run(*inputs, tmp_path / "stopped", *more))
    assert {"data", "teacher", "cache", "distill", "quantize", "report"} <= set(stopped)
    run_to_success("distill", small_run(*inputs, tmp_path / "undisturbed", *more))
    resumed, expected = (
        {file.parent.name: hash_file(file) for file in sorted((tmp_path / name / "student").rglob("*.safetensors"))}
        for name in ("stopped", "undisturbed")
    )
    assert resumed == expected
    assert resumed


def test_every_stage_of_a_pruned_run_resumes_after_a_stop(inputs, tmp_path):
    arguments = small_run(*inputs, tmp_path / "run", "--epochs", "1", "--teacher_train.epochs", "1", *SMALLER)
    arguments[arguments.index("--student") : arguments.index("--student") + 2] = ["--speedup", "1.2"]
    others = ("data", "teacher", "cache", "distill-1.2x", "export-teacher", "export-1.2x", "evaluate", "report")
    stopped = stop_in_each_stage("distill", arguments, others)
    assert {"start", "costs", "scores", "shape-1.2x"} <= set(stopped)


@pytest.mark.parametrize("module", ["evaluate", "report"])
def test_a_command_on_a_finished_run_resumes_after_a_stop(module, inputs, tmp_path_factory, tmp_path):
    run = tmp_path / "run"
    run_to_success("distill", small_run(*inputs, run, "--epochs", "1", "--teacher_train.epochs", "1"))
    measured = ["--measure.rounds", "1", "--measure.texts", "4", "--measure.batch", "4"]
    arguments = {
        "evaluate": ["--model", f"{run}/student", "--data", str(inputs[1]), "--output", f"{tmp_path}/e", *measured],
        "report": ["--run", str(run)],
    }[module]
    running = Running.of(module, arguments, fresh=True)
    running.wait_until_watched()
    assert running.stop(signal.SIGTERM) == 143
    assert_stopped(running, "SIGTERM")
    stop_in_each_stage(module, arguments)
