"""What a training writes to its stage's `logs` beside the rows of each attempt: range test, spikes, falls of the rate.

The logs stay when the stage is finished, and a resumed training finds in them what an earlier attempt did.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from pipelines.runs.files import write_json

_BELOW_LOWEST_LOSS = 10.0
RANGE_TEST, SPIKES, FALLS, RANKS = "range_test.csv", "spikes.json", "rate_falls.json", "ranks.json"


class RankTimes(TypedDict):
    """A replica of a training: seconds of a forward pass, the share in which it was idle, and its relative speed."""

    seconds: float
    idle_share: float
    speed: float


@dataclass(frozen=True)
class TrainingLogs:
    """The files of a training in the `logs` folder of its stage."""

    folder: Path

    @property
    def range_test(self) -> Path:
        """File of the range test, see `pipelines.runs.range_test`."""
        return self.folder / RANGE_TEST

    @property
    def spikes(self) -> Path:
        """File of the spikes that the training went back from, see `pipelines.runs.recovery`."""
        return self.folder / SPIKES

    def write_falls(self, falls: Sequence[tuple[int, float]]) -> None:
        """Writes the steps before each fall of `plateau` and the factor on the rate after it, if there are any."""
        if falls:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / FALLS, falls)

    def read_falls(self) -> list[tuple[int, float]]:
        """Returns what `write_falls` wrote; empty without a fall."""
        file = self.folder / FALLS
        return [(int(step), float(factor)) for step, factor in json.loads(file.read_text())] if file.is_file() else []

    def write_ranks(self, ranks: Sequence[RankTimes]) -> None:
        """Writes what was measured of each replica, see `pipelines.runs.rank_meter`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / RANKS, list(ranks))

    def read_ranks(self) -> list[RankTimes]:
        """Returns what `write_ranks` wrote; empty for a single replica."""
        file = self.folder / RANKS
        return list(json.loads(file.read_text())) if file.is_file() else []


@dataclass(frozen=True)
class RangeTest:
    """The losses of a short training whose rate grows from step to step.

    Args:
        rates: Learning rate of each step.
        losses: Smoothed loss of each step.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def rate(self) -> float:
        """A tenth of the rate at which the smoothed loss was lowest."""
        return self.rates[self.losses.index(min(self.losses))] / _BELOW_LOWEST_LOSS


def store_test(test: RangeTest, file: Path) -> None:
    """Writes rates and losses as csv, completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(("rate", "loss"))
        writer.writerows(zip(test.rates, test.losses, strict=True))
    partial.replace(file)


def load_test(file: Path) -> RangeTest:
    """Returns the test that `store_test` wrote."""
    with file.open(newline="") as opened:
        rows: Sequence[dict[str, str]] = list(csv.DictReader(opened))
    return RangeTest(tuple(float(row["rate"]) for row in rows), tuple(float(row["loss"]) for row in rows))
