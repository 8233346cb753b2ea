"""Work in a thread of its own during a block."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_in_background(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Runs `work` in a thread during the block, and waits for its end.

    Args:
        work: Gets an event that is set at the end of the block, however it ends; it should then return soon.
        name: Name of the thread.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
