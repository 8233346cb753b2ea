"""Timing in the test's own process, of functions that stand for models."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from compress.measure.latency import Runner, time_rounds
from compress.measure.load import ProcessorSeconds


class TimerHere:
    """What stands for a timing process, as a context manager too; `openings` counts how often models are opened."""

    def __init__(self, runners: Mapping[str, Runner[Any]]):
        self.time_rounds, self.processors, self.openings = partial(time_rounds, runners), ProcessorSeconds(), 1

    def reopen_models(self) -> None:
        self.openings += 1

    def __enter__(self) -> "TimerHere":
        return self

    def __exit__(self, *_: object) -> None:
        pass
