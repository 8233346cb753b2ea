"""Reads what a stage's logs say of its training beside the curves, for the report."""

import math
from pathlib import Path

from pipelines.reports.schema import RangeTestEntry, SpikeEntry, TrainingEntry
from pipelines.runs.recovery import FALL, load_spikes
from pipelines.runs.training_logs import TrainingLogs, load_test


def read_training_events(folder: Path) -> TrainingEntry | None:
    """Returns the range test, the spikes and the falls of the rate in a stage's `logs`; None if there were none."""
    logs = TrainingLogs(folder)
    events: TrainingEntry = {
        "range_test": _read_range_test(logs.range_test),
        "spikes": _read_spikes(logs.spikes),
        "falls": [{"step": step, "factor": factor} for step, factor in logs.read_falls()],
        "ranks": logs.read_ranks(),
    }
    return events if any(events.values()) else None


def _read_range_test(file: Path) -> RangeTestEntry | None:
    if not file.is_file():
        return None
    test = load_test(file)
    return {"rates": test.rates, "losses": test.losses, "chosen": test.rate}


def _read_spikes(file: Path) -> list[SpikeEntry]:
    return [
        {
            "step": each.step,
            "batch": each.batch,
            "loss": _if_finite(each.loss),
            "usual": _if_finite(each.usual),
            "factor": FALL**number,
        }
        for number, each in enumerate(load_spikes(file), 1)
    ]


def _if_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
