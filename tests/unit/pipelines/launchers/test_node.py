"""What a node starts: real processes of torchrun's agent, and the exit codes that launchers act on."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.launchers.node import find_interface, find_local_address

REPOSITORY = Path(__file__).parents[4]


def start_node(folder: Path, code: str, *options: str, name: str = "worker") -> subprocess.Popen:
    """Starts a node whose processes run a module of their own."""
    (folder / f"{name}.py").write_text(code)
    arguments = [
        sys.executable,
        "-m",
        "pipelines.launchers.node",
        "--nodes=1",
        "--rank=0",
        "--address=localhost:0",
        *options,
    ]
    variables = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{folder}"}
    return subprocess.Popen([*arguments, "--", name], env=variables, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (3, 1), (143, 75)])
def test_exit_codes_tell_whether_to_run_again(tmp_path, code, expected):
    node = start_node(tmp_path, f"import sys\nsys.exit({code})", "--restarts=0")
    _, errors = node.communicate(timeout=60)
    assert node.returncode == expected, errors
    assert "Traceback" not in errors


def test_a_failed_process_is_restarted(tmp_path):
    code = f"""
import os, sys
open({str(tmp_path / "starts")!r}, "a").write("x")
sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "2" else 1)
"""
    node = start_node(tmp_path, code, "--restarts=2")
    _, errors = node.communicate(timeout=60)
    assert node.returncode == 0, errors
    assert (tmp_path / "starts").read_text() == "xxx"


@pytest.mark.slow
def test_a_stopped_node_gives_its_processes_time_and_asks_to_be_run_again(tmp_path):
    code = f"""
import signal, sys, time, pathlib
def save(*_):
    time.sleep(1)
    pathlib.Path({str(tmp_path / "saved")!r}).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path({str(tmp_path / "running")!r}).touch()
time.sleep(60)
"""
    node = start_node(tmp_path, code, "--grace=20")
    deadline = time.monotonic() + 60
    while not (tmp_path / "running").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    node.send_signal(signal.SIGTERM)
    _, errors = node.communicate(timeout=60)
    assert node.returncode == 75, errors
    assert (tmp_path / "saved").exists()
    assert "stopped by SIGTERM" in errors


@pytest.mark.slow
def test_a_node_that_nobody_answers_names_the_address_and_ends(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    options = ["--nodes=2", "--rank=1", f"--address=127.0.0.1:{port}", "--timeout=3"]
    start = time.monotonic()
    node = start_node(tmp_path, "", *options)
    _, errors = node.communicate(timeout=60)
    assert node.returncode == 75, errors
    assert f"127.0.0.1:{port}: no response from the rendezvous node" in errors
    assert "Traceback" not in errors
    assert time.monotonic() - start < 40


@pytest.mark.slow
def test_two_nodes_share_a_world(tmp_path):
    code = f"""
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
(pathlib.Path({str(tmp_path)!r}) / f"rank-{{dist.get_rank()}}").write_text(str(total.item()))
dist.destroy_process_group()
"""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    options = ["--nodes=2", f"--address=127.0.0.1:{port}", "--timeout=20"]
    nodes = [start_node(tmp_path, code, *options, f"--rank={rank}") for rank in (0, 1)]
    errors = [node.communicate(timeout=90)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["3.0", "3.0"]


def test_the_address_of_this_machine_and_its_interface_are_found():
    assert find_local_address("127.0.0.1", is_first=False) == "127.0.0.1"
    assert find_interface("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert find_interface("203.0.113.7") is None


def test_a_host_whose_name_is_unknown_has_no_address(monkeypatch):
    def resolve(host: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, f"{host}: name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert find_local_address("first", is_first=False) is None
    assert find_local_address("first", is_first=True) is None
