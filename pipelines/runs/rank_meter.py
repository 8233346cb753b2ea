"""Measures how fast each replica of a student computes, how long it is idle, and divides batches by it."""

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Batch
from distill.data.batches.rank_speeds import MEASURED_SPEEDS, RankSpeeds, parse_speeds
from distill.parallel.layout import Layout
from pipelines.runs.training_logs import RankTimes, TrainingLogs

MEASURED_EVERY = 20  # batches between two measurements; each synchronizes the processes
WEIGHT = 0.5  # of the newest measurement in the mean
UNPREPARED = 2  # batches beyond those that may be prepared already


class RankMeter(Callback):
    """Callback that times the forward pass of every replica on some batches.

    The speed of a replica is the tokens of its rows, with padding, over that time. A replica is idle for the part of
    the slowest one's time that it doesn't need itself.

    Args:
        speeds: Speeds that are corrected; None: rows are divided as the data says, and none are corrected.
        data: Data whose batches are divided.
        logs: Where the results are kept.
    """

    def __init__(self, speeds: RankSpeeds | None, data: RowsDataModule, logs: TrainingLogs):
        self.speeds, self.data, self.logs = speeds, data, logs
        self.start, self.tokens, self.seconds = 0.0, 0, 0.0
        self.measured: list[list[float]] = []  # seconds of each replica, of each measurement

    def is_due(self, batch_idx: int) -> bool:
        """Returns whether this batch is timed; the first ones include compilation and the allocation of memory."""
        return batch_idx % MEASURED_EVERY == MEASURED_EVERY // 4

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Waits for the others and starts the clock."""
        if self.is_due(batch_idx):
            trainer.strategy.barrier()
            self.tokens = batch["input_ids"].numel()
            self.start = self._read_clock(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Stops the clock, before the backward pass in which replicas wait for each other."""
        if self.start:
            self.seconds, self.start = self._read_clock(trainer) - self.start, 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Exchanges the times, logs how long replicas were idle, and corrects the speeds."""
        if not self.is_due(batch_idx):
            return
        measurement = torch.tensor([self.seconds, float(self.tokens)], device=trainer.strategy.root_device)
        seconds, tokens = trainer.strategy.all_gather(measurement).reshape(-1, 2).T.tolist()
        self.measured.append(seconds)
        slowest = max(seconds)
        pl_module.log("train/idle_share", 1 - sum(seconds) / (len(seconds) * slowest))
        if self.speeds is not None:
            rates = [count / spent for count, spent in zip(tokens, seconds, strict=True)]
            self.correct(rates)

    def correct(self, rates: list[float]) -> None:
        """Moves the speeds towards the measured ones, for batches that aren't prepared yet."""
        assert self.speeds is not None
        assert self.data.batches is not None
        before = self.speeds.newest
        scale = sum(before) / sum(rates)
        mean = [(1 - WEIGHT) * old + WEIGHT * scale * new for old, new in zip(before, rates, strict=True)]
        ahead = 2 * self.data.threads + UNPREPARED
        self.speeds.change(self.data.batches.position + ahead, mean)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the mean times and idle shares of all replicas."""
        if self.measured and trainer.is_global_zero:
            self.logs.write_ranks(summarize_rank_times(self.measured, self.data.speeds))

    def _read_clock(self, trainer: Trainer) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def summarize_rank_times(measured: list[list[float]], speeds: RankSpeeds | None) -> list[RankTimes]:
    """Returns for each replica the mean seconds of a forward pass, its idle share, and its speed relative to all."""
    slowest = sum(map(max, measured))
    newest = speeds.newest if speeds is not None else (1.0,) * len(measured[0])
    return [
        {
            "seconds": sum(times) / len(times),
            "idle_share": 1 - sum(times) / slowest,
            "speed": speed * len(newest) / sum(newest),
        }
        for times, speed in zip(zip(*measured, strict=True), newest, strict=True)
    ]


def build_meter(text: str, data: RowsDataModule, layout: Layout, logs: TrainingLogs) -> list[Callback]:
    """Returns the meter of a training with replicas, and sets the speeds of its data; nothing for other layouts.

    Processes with segments of the same rows wait for each other within a pass, so that their times are the same.
    """
    if layout.dp == 1 or layout.shards_gradients or layout.cp > 1:
        return []
    data.speeds = parse_speeds(text, layout.dp)
    return [RankMeter(data.speeds if text == MEASURED_SPEEDS else None, data, logs)]
