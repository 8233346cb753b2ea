"""Timing of exported models on the same texts, block by block."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.measure.blocks import BlockTimes, Effort, TimedGroup, time_blocks
from compress.measure.interval import Estimate
from compress.measure.latency import Name, TimedInputs
from compress.measure.process import TimingProcess
from pipelines.reports.schema import EstimateEntry
from pipelines.runs.console import CALLS
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Run
from pipelines.settings.commands.distill import MeasureConfig
from pipelines.stages.deliver.timed_texts import EncodedTexts, RowBlocks, collate_calls

EVALUATION_SHARE = 0.2  # of a run's time, at most, unless even the fewest texts and the scores take more


@dataclass(frozen=True)
class CallConditions:
    """What a latency depends on besides the model.

    Args:
        batch: Texts per call.
        length: Tokens of every text; 0 for the texts' own lengths.
        threads: Threads of the runtime.
    """

    batch: int
    length: int
    threads: int


def time_models(
    run: Run,
    label: str,
    process: TimingProcess[Name],
    texts: Mapping[Name, EncodedTexts],
    groups: Sequence[TimedGroup[Name]],
    conditions: CallConditions,
    effort: Effort,
) -> dict[Name, BlockTimes]:
    """Times models of a process on blocks of rows drawn by the run's seed, until the groups are settled.

    Args:
        run: The run.
        label: Label of the progress.
        process: The process, with the models open.
        texts: Name -> the rows of a split by the model's tokenizer; another tokenizer may yield fewer.
        groups: Models that are timed on the same blocks.
        conditions: Batch, length and threads.
        effort: Least and most that is measured.

    Raises:
        TimingError: A model fails, or the process is killed.
    """
    count = min(len(rows) for rows, _ in texts.values())
    lengths = next(iter(texts.values()))[0].lengths[:count]
    blocks = RowBlocks.cut(lengths, effort.size, run.seed)

    def draw(number: int) -> dict[Name, list[TimedInputs]]:
        rows = blocks.draw(number)
        return {
            name: collate_calls(encoded, rows, conditions.batch, conditions.length) for name, encoded in texts.items()
        }

    calls = (effort.rounds + 1) * effort.size // conditions.batch * sum(len(each.names) for each in groups)
    with run.console.track(label, effort.max_blocks * calls, CALLS) as advance:
        return time_blocks(process, groups, draw, effort, on_calls=advance)


def estimate_entry(estimate: Estimate) -> EstimateEntry:
    """Returns an estimate as stored in JSON, which has no infinity."""
    high = estimate.high if math.isfinite(estimate.high) else None
    return {"value": estimate.value, "low": estimate.low, "high": high}


def remaining_seconds(run: Run) -> float:
    """Returns how long evaluation may still take in a run with training, so that its share is EVALUATION_SHARE."""
    seconds = {True: 0.0, False: 0.0}
    for stage in run.done:
        seconds[is_evaluation(stage.name)] += stage.manifest["wall_seconds"]
    allowed = EVALUATION_SHARE / (1 - EVALUATION_SHARE) * seconds[False] - seconds[True]
    return max(0.0, allowed)


def is_evaluation(stage: str) -> bool:
    """Returns whether a stage measures finished models."""
    return stage == "evaluate" or stage.startswith("speed-")


def describe_effort(measure: MeasureConfig) -> JsonObject:
    """Returns the settings of timing, for stage keys."""
    return {name: getattr(measure, name) for name in ("texts", "rounds", "interval", "seconds")}
