"""Peak memory of this process."""

import resource
from pathlib import Path


def reset_peak_memory() -> None:
    """Resets the peak on Linux; elsewhere the peak is that of the whole process lifetime."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Returns the peak resident bytes since `reset_peak_memory`; rusage alone would include the parent's peak."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
