"""A clock for tests of measured times, which moves only when they say so."""


class Clock:
    """A fake `time` module on which work takes exactly the time it declares."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds
