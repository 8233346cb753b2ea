"""Starts Python modules as forks of a process that has imported the libraries, which takes every new process 7 s.

A forked process has its own output, signals and exit code, and is a child of the process that starts it. It differs
from a new process in three ways: it has the server's hash seed, the libraries have read the server's environment on
import, and it ends after the functions registered with `atexit` without taking all modules apart, which would copy most
of the server's memory. Only libraries are imported by the server: Stillroom's modules are imported by each process.
"""

import atexit
import ctypes
import io
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

VERIFICATION = "compress.export.verify"
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
PID = struct.Struct("<q")
MAX_BYTES = 1 << 17  # of a request
WAIT_SECONDS = 10.0  # for the new parent


class ForkedProcess(subprocess.Popen):
    """A process `python -m module words`, forked by the server to which `requests` leads.

    All other commands are started in the usual way.
    """

    requests: ClassVar[socket.socket]
    modules: ClassVar[Sequence[str]] = ()  # that are forked; all, if empty

    def _execute_child(self, args: Any, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more: Any) -> None:
        if not self.forks(args):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)  # type: ignore[misc]
            return
        pipes = more[3:9]  # after startupinfo, creationflags and shell
        _, _, _, output, _, errors = pipes
        environment = dict(os.environ if env is None else env)
        request = [args[2:], str(cwd or Path.cwd()), environment, os.getpid()]
        reading, report = os.pipe()
        descriptors = [1 if output == -1 else output, 2 if errors == -1 else errors, report]
        socket.send_fds(self.requests, [json.dumps(request).encode()], descriptors)
        os.close(report)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        (self.pid,) = PID.unpack(os.read(reading, PID.size))
        self._child_created = True
        os.close(reading)

    def forks(self, args: Any) -> bool:
        python = isinstance(args, list) and args[:2] == [sys.executable, "-m"]
        return python and (not self.modules or args[2] in self.modules)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ends, such as the processes that a server forks."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def serve(requests: socket.socket) -> NoReturn:
    """Forks a process for each request, until no process has the other end of the socket."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the processes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, MAX_BYTES, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            if os.fork():
                os._exit(0)  # leaves the process to the one that sent the request
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, before)
            run(*json.loads(data), *descriptors)
        for each in descriptors:
            os.close(each)


def run(
    options: list[str], folder: str, environment: dict[str, str], parent: int, output: int, errors: int, report: int
) -> NoReturn:
    """Does what a new interpreter does for `python -m words` in the folder, as a child of `parent`."""
    until = time.monotonic() + WAIT_SECONDS
    while os.getppid() != parent:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.001)
    os.write(report, PID.pack(os.getpid()))
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for each in {output, errors, report} - {1, 2}:
        os.close(each)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = stream(1), stream(2)
    sys.path[0] = folder
    module, *arguments = options
    sys.argv = ["-m", *arguments]
    ctypes.CDLL(None).prctl(PR_SET_NAME, module[-15:].encode())
    fork_verifications()
    os._exit(run_module(module))


def fork_verifications() -> None:
    """Has this process fork the processes that verify exports, from a copy of itself in its present state."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    adopt_orphans()
    ForkedProcess.requests, ForkedProcess.modules = ours, (VERIFICATION,)
    subprocess.Popen = ForkedProcess  # type: ignore[misc]


def run_module(module: str) -> int:
    """Runs a module as `__main__` and returns the exit code, after everything an interpreter does before it exits."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = exit_code(ended.code)
    except BaseException:  # noqa: BLE001 - reported to the parent
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads that aren't daemons
    atexit._run_exitfuncs()
    for each in (sys.stdout, sys.stderr):
        with suppress(OSError):
            each.flush()
    return code


def exit_code(code: object) -> int:
    """Returns the exit code for the argument of `sys.exit`, after writing it to standard error if it is a text."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def stream(descriptor: int) -> io.TextIOWrapper:
    """Returns a standard stream for a pipe or file: output is collected in blocks, and errors are written in lines."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = open(descriptor, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115, PTH123
    errors = "backslashreplace" if descriptor == 2 else None
    return io.TextIOWrapper(raw, errors=errors, line_buffering=descriptor == 2, write_through=at_once)
