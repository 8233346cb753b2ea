"""Timing of models in blocks of texts, until their speed-ups are known closely enough."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

import numpy as np

from compress.measure.interval import MIN_BLOCKS
from compress.measure.latency import TEXTS_PER_TURN, Latency, Name, TimedInputs, ignore_calls, summarize_times
from compress.measure.process import TimingProcess

MAX_GROWTH = 8  # times the smallest number of blocks


@dataclass(frozen=True)
class Effort:
    """How much is measured at least and at most.

    Args:
        rounds: Times that each input is run.
        size: Texts of a block.
        min_blocks, max_blocks: Number of blocks.
        seconds: Time after which no further block is begun, once there are `min_blocks`.
    """

    rounds: int
    size: int
    min_blocks: int
    max_blocks: int
    seconds: float

    @staticmethod
    def plan(texts: int, rounds: int, batch: int, seconds: float) -> "Effort":
        """Returns the effort for at least `texts` texts, `batch` in a call, and at most MAX_GROWTH times as many.

        A call on a batch takes as long as many calls on single texts, so that it is repeated a third as often.
        """
        size = max(batch, min(TEXTS_PER_TURN, -(-texts // MIN_BLOCKS)) // batch * batch)
        blocks = max(MIN_BLOCKS, -(-texts // size))
        return Effort(rounds if batch == 1 else -(-rounds // 3), size, blocks, MAX_GROWTH * blocks, seconds)


@dataclass
class BlockTimes:
    """A model's times: for each block its milliseconds [rounds, calls] and its inputs [calls]."""

    times: list[np.ndarray] = field(default_factory=list)
    inputs: list[TimedInputs] = field(default_factory=list)

    @property
    def fastest(self) -> np.ndarray:
        """Milliseconds of each call's fastest repetition [blocks, calls]."""
        return np.stack([each.min(axis=0) for each in self.times])

    def summarize(self, threads: int) -> Latency:
        """Returns the statistics over all blocks."""
        return summarize_times(np.concatenate(self.times, axis=1), self.inputs, threads)


@dataclass(frozen=True)
class TimedGroup(Generic[Name]):
    """Models that are timed on the same blocks until `is_settled` accepts their times."""

    names: Sequence[Name]
    is_settled: Callable[[Mapping[Name, BlockTimes]], bool]


def time_blocks(
    process: TimingProcess[Name],
    groups: Sequence[TimedGroup[Name]],
    draw: Callable[[int], Mapping[Name, Sequence[TimedInputs]]],
    effort: Effort,
    *,
    on_calls: Callable[[int], None] = ignore_calls,
) -> dict[Name, BlockTimes]:
    """Times all models block by block; those of a settled group are left out of further blocks.

    Models alternate on a block. The next block has other texts, comes later, and the models are opened again for it if
    that takes little time: blocks differ as the texts of the data do, as the machine does from minute to minute, and as
    the places of weights in memory do.

    Args:
        process: The process, with the models open.
        groups: Each model's group.
        draw: Returns the inputs of a block by its number.
        effort: Least and most blocks.
        on_calls: As of `compress.measure.latency.time_rounds`.

    Returns:
        Name -> times.
    """
    block_times: dict[Name, BlockTimes] = {name: BlockTimes() for each in groups for name in each.names}
    unsettled, start = list(groups), time.perf_counter()
    for number in range(effort.max_blocks):
        if number >= effort.min_blocks:
            unsettled = [each for each in unsettled if not each.is_settled(block_times)]
            if not unsettled or time.perf_counter() - start > effort.seconds:
                break
        names = [name for each in unsettled for name in each.names]
        inputs = draw(number)
        if number:
            process.reopen_models()
        times = process.time_rounds({name: inputs[name] for name in names}, rounds=effort.rounds, on_calls=on_calls)
        for name in names:
            block_times[name].times.append(times[name])
            block_times[name].inputs += inputs[name]
    return block_times
