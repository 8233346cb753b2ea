"""The server from which all test processes are forked; it imports everything once, which takes many seconds."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

from support.commands import ROOT


def fork_server() -> ForkServerContext:
    """Returns the server's context, starting it on the first call. A second preload list would be ignored."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        # The server doesn't inherit the path on which pytest found this folder.
        paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        context.set_forkserver_preload(["support.processes.imported_once"])
        forkserver.ensure_running()
    return context
