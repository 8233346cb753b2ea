"""How long one call takes: several models in turn on the same inputs, so that a drift of the machine hits all alike."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

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


Name = TypeVar("Name", bound=Hashable)
Inputs = dict[str, np.ndarray]
Runner = Callable[[Inputs], object]


def measure(
    runners: Mapping[Name, Runner],
    inputs: Mapping[Name, Sequence[Inputs]],
    *,
    rounds: int,
    warmup: int = 1,
    threads: int = 1,
    on_call: Callable[[], None] = lambda: None,
) -> dict[Name, Latency]:
    """Times every runner on every text, `rounds` times, in turn; the first runner changes from call to call.

    Args:
        runners: Name -> function of one padded batch of token ids ([batch, length] int64 each).
        inputs: Name -> its batches of the same texts, which tokenizers may have cut differently; all of the same number
            of rows.
        rounds: Times each input is run.
        warmup: Rounds that aren't counted.
        threads: Threads of PyTorch while measuring; runners of other runtimes must be built with the same number.
        on_call: Told after each call, outside the timed part.
    """
    names = list(runners)
    times: dict[Name, list[float]] = {name: [] for name in names}
    with torch_threads(threads):
        for number in range(-warmup, rounds):
            for index in range(len(inputs[names[0]])):
                shift = (number + index) % len(names)
                for name in names[shift:] + names[:shift]:
                    batch = inputs[name][index]
                    start = time.perf_counter()
                    runners[name](batch)
                    elapsed = (time.perf_counter() - start) * 1e3
                    if number >= 0:
                        times[name].append(elapsed)
                    on_call()
    return {name: summary(values, inputs[name], threads) for name, values in times.items()}


def summary(values: Sequence[float], inputs: Sequence[Inputs], threads: int) -> Latency:
    shapes = [batch["input_ids"].shape for batch in inputs]
    batch, length = shapes[0][0], int(np.median([shape[1] for shape in shapes]))
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
