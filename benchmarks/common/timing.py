"""Ratios of times, the rate of copies, and waiting for a GPU."""

import statistics
import time
from collections.abc import Sequence

import torch

COPYING = "ms to copy as many bytes"  # column: what is only read takes less


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the median over the rounds of the ratio to the reference's time in the same round."""
    return statistics.median(seconds / base for seconds, base in zip(times, reference, strict=True))


def measure_copy_rate(device: torch.device, size: int = 1 << 26, repeats: int = 10) -> float:
    """Returns the bytes that a large copy reads and writes in a second.

    Args:
        device: Where the memory is.
        size: Bytes of the copied tensor: more than the device's caches hold.
        repeats: Number of copies, whose median counts.
    """
    source = torch.randn(size // 4, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times)


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
