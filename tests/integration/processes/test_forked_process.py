"""Processes forked by the command server: output, exit codes, signals and parents are those of new processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import start
from support.processes.command_server import start_server
from support.processes.forked_process import ForkedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux only")
ENDS = {
    "return": ("pass", 0, ""),
    "code": ("sys.exit(7)", 7, ""),
    "text": ("sys.exit('too late')", 1, "too late\n"),
    "error": ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    "signal": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "at once": ("os._exit(9)", 9, ""),
}


def run_code(folder: Path, code: str, **env: str) -> tuple[int, str, str]:
    """Runs a module of this code in a forked process; returns exit code, output and errors."""
    (folder / "own_module.py").write_text(f"import atexit, json, os, signal, sys, threading, time\n{code}\n")
    ForkedProcess.requests = start_server()
    process = ForkedProcess(
        [sys.executable, "-m", "own_module", "first", "--second"],
        cwd=folder, env=os.environ | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.parametrize("how", ENDS)
def test_exit_codes_and_last_lines_are_those_of_a_new_process(how, tmp_path):
    code, expected, last = ENDS[how]
    exit_code, output, errors = run_code(tmp_path, f"print('begun', flush=True)\n{code}")
    assert (exit_code, output) == (expected, "begun\n")
    assert errors.endswith(last)
    assert bool(errors) == bool(last)


def test_a_process_has_its_own_folder_environment_arguments_and_parent(tmp_path):
    facts = "[os.getcwd(), os.environ['OWN'], sys.argv[1:], os.getppid(), __name__, sys.path[0], list(sys.modules)]"
    code, output, _ = run_code(tmp_path, f"print(json.dumps({facts}))", OWN="value")
    *values, modules = json.loads(output)
    assert code == 0
    assert values == [str(tmp_path), "value", ["first", "--second"], os.getpid(), "__main__", str(tmp_path)]
    assert "torch" in modules
    assert not {"distill", "compress", "pipelines"} & set(modules), "the server imported more than libraries"


def test_threads_and_exit_functions_finish_before_the_process_ends(tmp_path):
    code = "atexit.register(print, 'last')\n"
    code += "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('first')"
    assert run_code(tmp_path, code) == (0, "first\nthread\nlast\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["--epochz", "3"]])
def test_a_forked_command_prints_what_a_new_process_prints(arguments):
    results = []
    for fresh in (False, True):
        process = start("distill", arguments, fresh=fresh)
        results.append((process.communicate(timeout=60)[0], process.returncode))
    assert results[0] == results[1]


def test_a_forked_command_is_killed_like_a_new_process():
    process = start("distill", ["--help"])
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
