"""Timing in the test's own process, of functions that stand for models."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from compress.measure.latency import Runner, time_rounds
from compress.measure.load import ProcessorSeconds


@contextmanager
def time_here(runners: Mapping[str, Runner[Any]]) -> Iterator[SimpleNamespace]:
    """Yields what stands for a timing process."""
    yield SimpleNamespace(time_rounds=partial(time_rounds, runners), processors=ProcessorSeconds())
