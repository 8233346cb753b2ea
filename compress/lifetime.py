"""A process that doesn't outlive the one that started it."""

import ctypes
import os
import signal
import sys

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def end_with_parent(parent: int) -> None:
    """Has the system kill this process when `parent`, which started it, ends, however it ends; Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was said
        os._exit(128 + signal.SIGKILL)
