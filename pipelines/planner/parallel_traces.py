"""Traces side by side, in processes that are copies of this one."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_in_processes(
    work: Callable[[_Item], _Result],
    items: Sequence[_Item],
    processes: int,
    on_item: Callable[[_Item], None] = lambda item: None,
) -> Iterator[_Result]:
    """Yields the result of each item in order, computed in this process or in several forked ones.

    Args:
        work: Any function, also one that can't be pickled; what it changes stays in the process that called it.
        items: Its arguments, which are pickled, as are its results. Several processes begin with the last ones, which
            should be those that take longest, so that no process ends long after the others.
        processes: Number of processes.
        on_item: Called with an item when its result is there.
    """
    if processes == 1 or len(items) < 2:
        results: Iterator[Any] = map(work, items)
        yield from report_each(results, items, on_item)
        return
    context = get_context("fork")
    with ProcessPoolExecutor(min(processes, len(items)), context, initializer=set_work, initargs=(work,)) as pool:
        waiting = [pool.submit(call_work, item) for item in reversed(items)]
        forked: Iterator[Any] = (each.result() for each in reversed(waiting))
        yield from report_each(forked, items, on_item)


def report_each(
    results: Iterator[_Result], items: Sequence[_Item], on_item: Callable[[_Item], None]
) -> Iterator[_Result]:
    """Yields the results, each after its item was reported."""
    for item, result in zip(items, results, strict=True):
        on_item(item)
        yield result


_work: Callable[[Any], Any] | None = None


def set_work(work: Callable[[Any], Any]) -> None:
    """Keeps the function that this process calls."""
    global _work  # a forked process inherits the function, which can't be sent to it
    _work = work
    torch.set_num_threads(1)  # OpenMP's threads don't exist in a forked process, which would wait for them


def call_work(item: object) -> object:
    """Returns the result of an item."""
    assert _work is not None
    return _work(item)
