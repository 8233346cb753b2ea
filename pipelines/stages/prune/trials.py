"""Short trainings of candidates side by side; the candidate that learns best from the teacher is trained to the end."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from lightning.fabric.utilities import move_data_to_device
from transformers import PreTrainedModel

from compress.measure.precision_speed import autocast_to_mode
from distill.data.batches.data_module import TextDataModule
from distill.losses.compose import weighted_sum
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import SignalSource
from distill.models.short_attention import attend_to_short_texts
from distill.tasks.logit_rows import OutputRows
from distill.train.averaging import set_optimizer_mode
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer, set_rate
from pipelines.runs.console import STEPS, TEXTS, Console
from pipelines.stages.prepare.scoring import TeacherComparison

_WARMUP = 20  # steps
_CPU = torch.device("cpu")
REDUCTION = 3  # one in this many trials continues


class Trial:
    """The training of a candidate, with warm-up and then a constant rate, so that it can continue after comparisons.

    Args:
        student: The candidate.
        data: The training texts.
        signals: Maps a batch to the teacher's signals.
        loss: Weights of the terms.
        train: Optimizer, and the rate after warm-up.
        output_rows: Defines the rows of a batch.
        device: Where to train.
        precision: Mode of the training, such as bf16-mixed.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        data: TextDataModule,
        signals: SignalSource,
        loss: LossConfig,
        train: TrainConfig,
        output_rows: OutputRows,
        *,
        device: torch.device = _CPU,
        precision: str = "32",
    ):
        student.to(device)  # type: ignore[arg-type]
        self.module = DistillationModule(
            student, loss=find_trial_loss(loss), train=train, signals=signals, output_rows=output_rows
        )
        self.module.on_fit_start()
        self.optimizer = build_optimizer(student, [], train)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.batches, self.steps, self.max_grad_norm = data.repeat_train_batches(), 0, train.max_grad_norm
        self.signals, self.device, self.precision = signals, device, precision

    def run(self, steps: int) -> None:
        """Trains for a number of further steps; leaves the student with the averaged weights, if there are any."""
        set_optimizer_mode(self.optimizer, "train")
        with attend_to_short_texts() if self.device.type == "cpu" else nullcontext():
            for _ in range(steps):
                self._take_step()
        set_optimizer_mode(self.optimizer, "eval")

    def _take_step(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            set_rate(group, rate * min(1.0, (self.steps + 1) / _WARMUP))
        batch = next(self.batches)
        batch = move_data_to_device({**batch, "signals": self.signals(batch)}, self.device)
        with autocast_to_mode(self.precision, self.device):
            loss = weighted_sum(self.module.loss, self.module.compute_terms(batch))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.steps += 1


def find_trial_loss(loss: LossConfig) -> LossConfig:
    """Returns the loss of trials: without layer terms, and with the mean weights of ramps.

    Candidates of different depths would be trained on different layer pairs, and the first weights of a ramp may be 0.
    """
    return loss.without_layer_terms.interpolate_ramps(0.5)


def eliminate_trials(
    trials: Sequence[Trial], comparison: TeacherComparison, steps: int, console: Console
) -> tuple[int, list[list[float]]]:
    """Returns the index of the trial that learns best, and each trial's divergence after each of its rounds.

    In each round all remaining trials are trained and the better third continues. The last round takes `steps` steps,
    and each earlier round a third of the next one's, so that all rounds take about the same time.

    Source: successive halving, Jamieson and Talwalkar 2016 (arXiv 1502.07943), with thirds instead of halves as in
    Hyperband (Li et al. 2018, arXiv 1603.06560).
    """
    remaining = list(range(len(trials)))
    divergences: list[list[float]] = [[] for _ in trials]
    for count, each in plan_rounds(len(trials), steps):
        remaining = sorted(remaining, key=lambda number: divergences[number][-1:])[:count]
        with console.track(f"shape: training {count} candidates", count * each, STEPS) as advance:
            for number in remaining:
                trials[number].run(each)
                advance(each)
        with console.track(f"shape: comparing {count} candidates", count * len(comparison), TEXTS) as advance:
            for number in remaining:
                divergences[number].append(comparison.divergence(trials[number].module.student))
                advance(len(comparison))
    return min(remaining, key=lambda number: divergences[number][-1]), divergences


def plan_rounds(trials: int, steps: int) -> list[tuple[int, int]]:
    """Returns (number of trials, steps per trial) of each round."""
    counts = [trials]
    while counts[-1] > REDUCTION:
        counts.append(-(-counts[-1] // REDUCTION))
    last = len(counts) - 1
    return [(count, max(1, steps // REDUCTION ** (last - number))) for number, count in enumerate(counts)]
