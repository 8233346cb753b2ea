"""What a training writes to its stage's `logs` beside the rows of each attempt: range test, spikes, falls of the rate.

The logs stay when the stage is finished, and a resumed training finds in them what an earlier attempt did.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.runs.files import write_json

RANGE_TEST, SPIKES, FALLS = "range_test.csv", "spikes.json", "rate_falls.json"


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
