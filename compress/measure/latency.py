"""Latency measurement: models alternate on the same inputs, so that machine drift affects all of them alike."""

import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

import numpy as np


@dataclass(frozen=True)
class Latency:
    """Milliseconds per call.

    Args:
        batch: Texts per call.
        length: Median of the padded lengths of the calls, in tokens.
        threads: Threads of the runtime.
        repeats: Number of measured calls.
        median_ms, p10_ms, p90_ms: Quantiles over all calls.
        best_ms: Median over the texts of each text's fastest call, which excludes interference by other processes: it
            is reproducible from minute to minute, and speed-ups are computed from it.
    """

    batch: int
    length: int
    threads: int
    repeats: int
    median_ms: float
    p10_ms: float
    p90_ms: float
    best_ms: float


TEXTS_PER_TURN = 16  # a runner's uninterrupted calls that are counted
# Milliseconds of calls before them: after a model of 92 MB, one of 10 MB took seven calls (4 ms) to warm up.
WARMUP_MS = 10
Name = TypeVar("Name", bound=Hashable)
TimedInputs = dict[str, np.ndarray]
Inputs = TypeVar("Inputs")
Runner = Callable[[Inputs], object]


def ignore_calls(count: int) -> None:
    """Does nothing with a number of calls."""


def measure_latency(
    runners: Mapping[Name, Runner[TimedInputs]],
    inputs: Mapping[Name, Sequence[TimedInputs]],
    *,
    rounds: int,
    warmup: int = 1,
    threads: int = 1,
    on_calls: Callable[[int], None] = ignore_calls,
) -> dict[Name, Latency]:
    """Returns name -> its latency, measured by `time_rounds`, whose arguments it takes."""
    times = time_rounds(runners, inputs, rounds=rounds, warmup=warmup, threads=threads, on_calls=on_calls)
    return {name: summarize_times(values, inputs[name], threads) for name, values in times.items()}


def time_rounds(
    runners: Mapping[Name, Runner[Inputs]],
    inputs: Mapping[Name, Sequence[Inputs]],
    *,
    rounds: int,
    warmup: int = 1,
    threads: int = 1,
    on_calls: Callable[[int], None] = ignore_calls,
) -> dict[Name, np.ndarray]:
    """Times every runner on every text, `rounds` times, alternating between runners after TEXTS_PER_TURN texts.

    Within a turn one runner runs alone, as in deployment: with alternation after every text, a large model would evict
    a small one's weights from the cache each time, and the small one would look half as fast. For the same reason the
    calls in the first WARMUP_MS of a turn, at least one, aren't counted. The order of the runners changes from turn to
    turn.

    Args:
        runners: Name -> function of one call's inputs, such as a padded batch of token ids ([batch, length] int64
            each); those without inputs aren't called.
        inputs: Name -> the inputs of its calls, on the same texts for all, which tokenizers may have split differently,
            and with the same number of rows.
        rounds: Times each input is run.
        warmup: Rounds that aren't counted.
        threads: Threads of PyTorch while measuring, if it is loaded; runners of other runtimes must be built with the
            same number.
        on_calls: Called after each turn with its number of timed calls.

    Returns:
        Name -> milliseconds [rounds, inputs].
    """
    names = list(inputs)
    times: dict[Name, list[float]] = {name: [] for name in names}
    with limit_torch_threads(threads):
        for number in range(-warmup, rounds):
            for turn, first in enumerate(range(0, len(inputs[names[0]]), TEXTS_PER_TURN)):
                shift = (number + turn) % len(names)
                for name in names[shift:] + names[:shift]:
                    batches = inputs[name][first : first + TEXTS_PER_TURN]
                    milliseconds = _time_calls(runners[name], batches)
                    times[name] += milliseconds if number >= 0 else []
                    on_calls(len(batches))
    return {name: np.reshape(values, (rounds, -1)) for name, values in times.items()}


@contextmanager
def limit_torch_threads(count: int) -> Iterator[None]:
    """Limits PyTorch, if it is loaded, to `count` threads inside the block; 0 leaves the number unchanged."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    previous = torch.get_num_threads()
    torch.set_num_threads(count or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _time_calls(runner: Runner[Inputs], batches: Sequence[Inputs]) -> list[float]:
    """Returns the milliseconds of each call, after those that aren't counted."""
    _warm_up(runner, batches)
    milliseconds = []
    for batch in batches:
        start = time.perf_counter()
        runner(batch)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return milliseconds


def _warm_up(runner: Runner[Inputs], batches: Sequence[Inputs]) -> None:
    """Calls the runner on the batches in turn, at least once, until WARMUP_MS have passed."""
    start = time.perf_counter()
    for batch in cycle(batches):
        runner(batch)
        if (time.perf_counter() - start) * 1e3 >= WARMUP_MS:
            return


def summarize_times(times: np.ndarray, inputs: Sequence[TimedInputs], threads: int) -> Latency:
    """Returns the statistics of milliseconds [rounds, inputs]."""
    shapes = [batch["input_ids"].shape for batch in inputs]
    batch, length = shapes[0][0], int(np.median([shape[1] for shape in shapes]))
    p10, median, p90 = (float(q) for q in np.quantile(times, [0.1, 0.5, 0.9]))
    return Latency(batch, length, threads, times.size, median, p10, p90, float(np.median(times.min(axis=0))))
