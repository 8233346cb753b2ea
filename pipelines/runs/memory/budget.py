"""The memory that a training may take: what the settings allow, or what the machine has left."""

import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from compress.measure.memory import read_kernel_sizes, read_resident_memory
from compress.prune.budget import parse_bytes
from distill.train.config import AUTO

_SHARE = 0.9  # of what is free: other processes, and what isn't predicted, need the rest
_CGROUP = (  # limit and use of memory, of both versions of control groups
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def resolve_memory_budget(setting: str, device: torch.device, processes: int) -> int:
    """Returns the bytes that a process may take on its device.

    Args:
        setting: A size such as 8GB, or `auto`: what the process has, and nine tenths of its share of what is free.
        device: The device that trains; on a GPU only its own memory counts.
        processes: Number of processes that share this machine's memory.
    """
    if setting != AUTO:
        return parse_bytes(setting, "machine.memory")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_allocated(device) + int(_SHARE * free)
    return read_resident_memory() + int(_SHARE * min(_list_free_memory()) / processes)


def read_held_memory(device: torch.device) -> int:
    """Returns the bytes that this process has on a device now; on a CPU, its resident memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else read_resident_memory()


def _list_free_memory() -> Iterator[int]:
    """Yields the free bytes by the machine's, the control group's and the process's own account."""
    machine = read_kernel_sizes("/proc/meminfo").get("MemAvailable")
    yield machine or torch.iinfo(torch.int64).max
    for limit, used in _CGROUP:
        if Path(limit).exists() and Path(used).exists() and (maximum := Path(limit).read_text().strip()).isdigit():
            yield int(maximum) - int(Path(used).read_text())
    most_mapped, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most_mapped != resource.RLIM_INFINITY:
        yield most_mapped - read_kernel_sizes().get("VmSize", 0)
