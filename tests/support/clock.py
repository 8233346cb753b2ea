"""A clock for tests of measured times, which only they move on."""


class Clock:
    """Stands in for the `time` module where work takes exactly the time that it declares."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds
