"""Ordered prefetching on threads: prepares the next batches while the current step runs."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


class Waiting:
    """Measures the share of time that a consumer waits for its data."""

    def __init__(self) -> None:
        self.waited, self.since = 0.0, time.perf_counter()

    def add(self, seconds: float) -> None:
        self.waited += seconds

    def share(self) -> float:
        """Returns the share of the time since the last call that was spent waiting, 0 to 1."""
        now = time.perf_counter()
        share = self.waited / max(now - self.since, 1e-9)
        self.waited, self.since = 0.0, now
        return share


class Prefetcher(Generic[Item, Made]):
    """Maps `make` over items, up to `depth` of them ahead of the consumer; an error is raised at its item's turn.

    Args:
        make: Called once per item, on a thread.
        items: Iterated on the consumer's thread.
        threads: Number of workers; 0 processes each item on request.
        depth: Maximum number of items in progress or done; 2 per thread by default.
        waiting: Records how long the consumer waits.
    """

    def __init__(
        self,
        make: Callable[[Item], Made],
        items: Iterable[Item],
        *,
        threads: int = 1,
        depth: int | None = None,
        waiting: Waiting | None = None,
    ):
        self.make, self.items, self.threads = make, items, threads
        self.depth = depth or 2 * threads
        self.waiting = waiting or Waiting()

    def __iter__(self) -> Iterator[Made]:
        return self._ahead() if self.threads else self._now()

    def _now(self) -> Iterator[Made]:
        for item in self.items:
            start = time.perf_counter()
            made = self.make(item)
            self.waiting.add(time.perf_counter() - start)
            yield made

    def _ahead(self) -> Iterator[Made]:
        items = iter(self.items)
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="ahead")
        try:
            under_way: deque[Future[Made]] = deque(pool.submit(self.make, item) for item in islice(items, self.depth))
            while under_way:
                start = time.perf_counter()
                made = under_way.popleft().result()
                self.waiting.add(time.perf_counter() - start)
                under_way.extend(pool.submit(self.make, item) for item in islice(items, 1))
                yield made
        finally:  # also if the consumer stops early
            pool.shutdown(wait=True, cancel_futures=True)
