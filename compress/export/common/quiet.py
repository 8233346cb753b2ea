"""Suppression of exporters' terminal output; their failures are exceptions."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses prints, warnings, and log messages below errors inside the block."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        out, bars = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with warnings.catch_warnings(), out, bars:
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
