"""Helpers for the lifetime of child processes: termination with the parent, and names of signals."""

import ctypes
import os
import signal
import sys

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process as soon as its parent, process `parent`, ends for any reason; Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(128 + signal.SIGKILL)


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as `SIGKILL`, or `signal 35` for a signal without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
