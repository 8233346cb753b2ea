"""Keeps the chatter of exporters off the terminal; what goes wrong there is an exception."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside the block nothing is printed, warned of, or logged below an error."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        out, bars = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with warnings.catch_warnings(), out, bars:
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
