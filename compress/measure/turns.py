"""Timing of alternatives that take turns, so that drift of the machine affects all of them alike."""

import time
from collections.abc import Callable, Mapping


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
