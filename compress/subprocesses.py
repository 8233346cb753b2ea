"""How processes end: not after the one that started them, and by which signal."""

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


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 35` of those without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
