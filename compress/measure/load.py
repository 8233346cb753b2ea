"""How busy a machine is with other processes while models are timed."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.1  # share of a machine's processors from which on other processes noticeably slow models


@dataclass(frozen=True)
class ProcessorSeconds:
    """Seconds for which the machine's processors worked for other processes than this one, and seconds in all."""

    others: float = 0.0
    total: float = 0.0

    def __add__(self, more: "ProcessorSeconds") -> "ProcessorSeconds":
        return ProcessorSeconds(self.others + more.others, self.total + more.total)

    @property
    def share(self) -> float | None:
        """The others' share of all; None if nothing was measured."""
        return self.others / self.total if self.total else None


def start_counting(stat: Path = Path("/proc/stat")) -> Callable[[], ProcessorSeconds]:
    """Returns a function that returns the processor seconds since this call; none where the system doesn't say.

    Args:
        stat: The kernel's counts of processor time; Linux only.
    """
    busy, own, clock = _read_busy_seconds(stat), time.process_time(), time.perf_counter()

    def count() -> ProcessorSeconds:
        now = _read_busy_seconds(stat)
        if busy is None or now is None:
            return ProcessorSeconds()
        others = now - busy - (time.process_time() - own)
        return ProcessorSeconds(max(0.0, others), (time.perf_counter() - clock) * (os.cpu_count() or 1))

    return count


def _read_busy_seconds(stat: Path) -> float | None:
    try:
        fields = stat.read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, hard, soft, stolen = map(int, fields)  # the others are those of idle processors
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")
