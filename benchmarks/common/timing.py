"""Timing of alternatives that take turns, so that drift of the machine affects all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def time_in_turns(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Returns the seconds of each step in each round; the order rotates from round to round.

    Args:
        steps: Name -> function that runs a step.
        rounds: Number of rounds that are timed.
        warmup: Number of rounds before them that aren't.
        before: Called before each step, and not timed; for example waits for other processes.
        after: Called after each step, and timed as a part of it; for example waits until a GPU is idle.
    """
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            before()
            start = time.perf_counter()
            steps[name]()
            after()
            if number >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the median over the rounds of the ratio to the reference's time in the same round."""
    return statistics.median(own / other for own, other in zip(times, reference, strict=True))


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
