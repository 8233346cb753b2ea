"""The one server that the tests' processes are forked from: it has imported everything, which takes many seconds."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

from support.commands import ROOT


def forking() -> ForkServerContext:
    """The server's context; it is started at the first call. A second list of imports would be passed over."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        # The server doesn't know where pytest found this folder.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        context.set_forkserver_preload(["support.imported_once"])
        forkserver.ensure_running()
    return context
