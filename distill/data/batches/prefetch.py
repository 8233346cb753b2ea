"""Ordered prefetching on threads: prepares the next batches while the current step runs."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class WaitTimer:
    """Measures the share of time that a consumer waits for its data."""

    def __init__(self) -> None:
        self.waited, self.since = 0.0, time.perf_counter()
        self.total, self.start = 0.0, self.since

    def add(self, seconds: float) -> None:
        """Adds time that the consumer waited."""
        self.waited += seconds
        self.total += seconds

    def measure_share(self) -> float:
        """Returns the share of the time since the last call that was spent waiting, 0 to 1."""
        now = time.perf_counter()
        share = self.waited / max(now - self.since, 1e-9)
        self.waited, self.since = 0.0, now
        return share

    def measure_total_share(self) -> float:
        """Returns the share of all time so far that was spent waiting, 0 to 1."""
        return self.total / max(time.perf_counter() - self.start, 1e-9)


class Prefetcher(Generic[Item, Result]):
    """Maps a function over items, up to `depth` of them ahead of the consumer; an error is raised at its item's turn.

    Args:
        function: Called once per item, on a thread.
        items: Iterated on the consumer's thread.
        threads: Number of workers; 0 processes each item on request.
        depth: Maximum number of items in progress or done; 2 per thread by default.
        waiting: Records how long the consumer waits.
    """

    def __init__(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        threads: int = 1,
        depth: int | None = None,
        waiting: WaitTimer | None = None,
    ):
        self.function, self.items, self.threads = function, items, threads
        self.depth = depth or 2 * threads
        self.waiting = waiting or WaitTimer()

    def __iter__(self) -> Iterator[Result]:
        return self._map_on_threads() if self.threads else self._map_on_request()

    def _map_on_request(self) -> Iterator[Result]:
        for item in self.items:
            start = time.perf_counter()
            result = self.function(item)
            self.waiting.add(time.perf_counter() - start)
            yield result

    def _map_on_threads(self) -> Iterator[Result]:
        items = iter(self.items)
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="ahead")
        try:
            pending: deque[Future[Result]] = deque(
                pool.submit(self.function, item) for item in islice(items, self.depth)
            )
            while pending:
                start = time.perf_counter()
                result = pending.popleft().result()
                self.waiting.add(time.perf_counter() - start)
                pending.extend(pool.submit(self.function, item) for item in islice(items, 1))
                yield result
        finally:  # also if the consumer stops early
            pool.shutdown(wait=True, cancel_futures=True)
