"""Does work for the batches to come on threads, in order, while the step before runs."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


class Waiting:
    """Seconds that a consumer stood still for its data, against the seconds that passed."""

    def __init__(self) -> None:
        self.waited, self.since = 0.0, time.perf_counter()

    def add(self, seconds: float) -> None:
        self.waited += seconds

    def share(self) -> float:
        """Share of the time since the last call, 0 to 1."""
        now = time.perf_counter()
        share = self.waited / max(now - self.since, 1e-9)
        self.waited, self.since = 0.0, now
        return share


class Ahead(Generic[Item, Made]):
    """Maps `make` over items, up to `depth` of them before they are asked for; an error comes at its item's turn.

    Args:
        make: Called on a thread, once an item.
        items: Drawn from on the consumer's thread.
        threads: Workers; 0 makes each item when it is asked for.
        depth: Most items under way or done; 2 a thread where left out.
        waiting: Told how long the consumer stood still.
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
        finally:  # also when the consumer stops in the middle
            pool.shutdown(wait=True, cancel_futures=True)
