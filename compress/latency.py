"""How long one call takes: several models in turn on the same inputs, so that a drift of the machine hits all alike."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Latency:
    """Times of single calls in milliseconds.

    Args:
        batch: Texts a call.
        length: Median of the padded lengths of the calls, in tokens.
        threads: Threads the runtime was given.
        repeats: Calls measured.
        median_ms, p10_ms, p90_ms: Quantiles over all calls.
    """

    batch: int
    length: int
    threads: int
    repeats: int
    median_ms: float
    p10_ms: float
    p90_ms: float


Inputs = dict[str, np.ndarray]
Runner = Callable[[Inputs], object]


def measure(
    runners: Mapping[str, Runner],
    inputs: Sequence[Inputs],
    *,
    rounds: int,
    warmup: int = 1,
    threads: int = 1,
    on_call: Callable[[], None] = lambda: None,
) -> dict[str, Latency]:
    """Times every runner on every input, `rounds` times, in turn; the first runner changes from call to call.

    Args:
        runners: Name -> function of one padded batch of token ids ([batch, length] int64 each).
        inputs: The batches; all of the same number of rows.
        rounds: Times each input is run.
        warmup: Rounds that aren't counted.
        threads: Threads of PyTorch while measuring; runners of other runtimes must be built with the same number.
        on_call: Told after each call, outside the timed part.
    """
    names = list(runners)
    times: dict[str, list[float]] = {name: [] for name in names}
    with torch_threads(threads):
        for number in range(-warmup, rounds):
            for index, batch in enumerate(inputs):
                shift = (number + index) % len(names)
                for name in names[shift:] + names[:shift]:
                    start = time.perf_counter()
                    runners[name](batch)
                    elapsed = (time.perf_counter() - start) * 1e3
                    if number >= 0:
                        times[name].append(elapsed)
                    on_call()
    shape = [batch["input_ids"].shape for batch in inputs]
    rows, length = shape[0][0], int(np.median([s[1] for s in shape]))
    return {name: summary(values, rows, length, threads) for name, values in times.items()}


def summary(values: Sequence[float], batch: int, length: int, threads: int) -> Latency:
    p10, median, p90 = (float(q) for q in np.quantile(values, [0.1, 0.5, 0.9]))
    return Latency(batch, length, threads, len(values), median, p10, p90)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """PyTorch on `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
