"""Memory of this process: what it holds, and the most that it held."""

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers of these options
_LARGE = 1 << 18  # bytes of a block that is returned to the system as soon as it is freed


def reset_peak_memory() -> None:
    """Resets the peak on Linux; elsewhere the peak is that of the whole process lifetime."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def read_peak_memory() -> int:
    """Returns the peak resident bytes since `reset_peak_memory`; rusage alone would include the parent's peak."""
    return read_kernel_sizes().get("VmHWM") or _read_usage()


def read_resident_memory() -> int:
    """Returns the resident bytes; where the system doesn't say, the most that there were."""
    return read_kernel_sizes().get("VmRSS") or _read_usage()


def return_freed_memory() -> None:
    """Returns freed blocks to the system now and, large ones, whenever they are freed; has an effect with glibc only.

    Otherwise glibc keeps freed blocks of up to 32 MiB, so that tensors of changing sizes leave gaps between them.
    """
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TRIM_THRESHOLD, _LARGE)
        library.malloc_trim(0)


def read_kernel_sizes(file: str = "/proc/self/status") -> dict[str, int]:
    """Returns the sizes in bytes by name of a file with lines such as `VmRSS: 1024 kB`; empty where there is none."""
    with suppress(OSError):
        lines = (line.split() for line in Path(file).read_text().splitlines() if line.endswith(" kB"))
        return {name.rstrip(":"): 1024 * int(size) for name, size, _ in lines}
    return {}


def _read_usage() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
