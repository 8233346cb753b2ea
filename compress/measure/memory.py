"""Peak memory of this process."""

import resource
import sys
from pathlib import Path


def reset_peak_memory() -> None:
    """Resets the peak on Linux; elsewhere the peak is that of the whole process lifetime."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def read_peak_memory() -> int:
    """Returns the peak resident bytes since `reset_peak_memory`; rusage alone would include the parent's peak."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
