"""The shape stage: searches the units to keep for a target speed, by short trainings and repeated measurements."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from compress.measure.precision_modes import MODES
from compress.prune.budget import TOLERANCE
from compress.prune.search.candidates import Candidate, SearchSpace, list_candidates, make_smallest_candidate
from distill.errors import InputError
from distill.train.activation_checkpointing import FULL
from distill.train.config import AUTO, TrainConfig
from pipelines.reports.pruning_summary import UNREACHED
from pipelines.runs.files import write_json
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.strategies.by_layout import choose_device
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import SpeedTarget
from pipelines.stages.prepare.scoring import TeacherComparison
from pipelines.stages.prune.deployed_models import rounding_key
from pipelines.stages.prune.search_device import choose_search_device
from pipelines.stages.prune.shape_inputs import LoadedInputs, ShapeInputs
from pipelines.stages.prune.shape_timing import (
    AIM,
    MeasuredChoice,
    ShapeTimer,
    TooLargeError,
    ffn_settings,
    list_allowed_ms,
)
from pipelines.stages.prune.trials import Trial, eliminate_trials, find_trial_loss
from pipelines.stages.train.recovery_rate import RULE
from pipelines.stages.train.student_start import SHAPE
from pipelines.stages.train.training_inputs import open_cached_signals

VERSION = 12  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
TOO_LARGE_VERSION = 2  # of what follows a shape whose files are too large; 1 tried no others
MEASURED = ("speedup", "pooled_speedup", "best_ms", "teacher_ms", "bytes")  # of the last measurement
COMPARED_SAMPLES = 2048  # of the validation split, by which the trials are compared: all candidates on the same ones
TRIAL_SETTINGS = (
    "learning_rate", "batch_size", "weight_decay", "max_grad_norm", "head_rate", "dropout", "freeze_embeddings",
)  # fmt: skip
FURTHER_TRIAL_SETTINGS = "optimizer", "rate_scaling", "accumulate", "reference_batch", "batch_tokens", "ema_decay"


def shape_stage(run: Run, config: DistillConfig, inputs: ShapeInputs, target: SpeedTarget, precision: str) -> Artefact:
    """Writes `shape.json`: the units that are kept, each candidate's trial results, and all measurements.

    `precision` is that of the student's training.
    """

    def work(folder: Path) -> JsonObject:
        search = ShapeSearch(LoadedInputs(run, config, inputs), target.corrected, folder, precision)
        return write_shape(folder, search.choose())

    settings = describe_search(config, target, precision)
    return run.stage(f"shape-{target.name}", settings, inputs.by_name(), work, version=VERSION)


def describe_search(config: DistillConfig, target: SpeedTarget, precision: str) -> JsonObject:
    """Returns the target and the settings of its search, for stage keys."""
    train, default, trial_precision = config.train, TrainConfig(), choose_trial_precision(config, precision)
    further = [each for each in FURTHER_TRIAL_SETTINGS if getattr(train, each) != getattr(default, each)]
    is_tolerant = config.budget.frontier or target.correction != 1  # of a target that no shape reaches
    return describe_measuring(config, target) | {
        "trials": config.prune.trial_steps,
        # Keys of older runs lack the further ones.
        "train": {name: getattr(train, name) for name in (*TRIAL_SETTINGS, *further)} | {"rate": RULE},
        "loss": vars(find_trial_loss(config.loss)),
        **ffn_settings(config),
        # Any other search that found files too large failed, so that no stage has its result.
        **({"too_large": TOO_LARGE_VERSION} if target.max_bytes and is_tolerant else {}),
        # Keys of trials in float32 lack the precision.
        **({"precision": trial_precision} if trial_precision != "32" else {}),
    }


def choose_trial_precision(config: DistillConfig, precision: str) -> str:
    """Returns the precision of trials: that of the training if it takes autocast alone, on the same device; else 32."""
    accelerator = config.machine.accelerator
    is_same_device = choose_search_device(accelerator).type == choose_device(accelerator).type
    is_autocast = MODES[precision].is_stock and precision != "16-mixed"  # which also scales the loss
    return precision if is_same_device and is_autocast else "32"


def describe_measuring(config: DistillConfig, target: SpeedTarget) -> JsonObject:
    """Returns the target and the settings of its measurements, for stage keys."""
    return {
        "target": asdict(target),
        "budget": config.budget.timing_settings() | {"uniform": config.budget.uniform},
        "max_length": config.data.max_length,
        "scheme": rounding_key(config),
    }


def read_correction(shape: Artefact) -> float:
    """Returns the correction of the target that a shape was chosen for."""
    return float(shape.manifest["config"]["target"]["correction"])


def write_shape(folder: Path, result: JsonObject) -> JsonObject:
    """Writes `shape.json` and returns the metrics of its stage."""
    write_json(folder / SHAPE, result)
    return {name: result[name] for name in (*MEASURED, "sizes", "teacher_score", UNREACHED) if name in result}


class ShapeSearch:
    """The search for the shape of a single target; `precision` is that of the student's training."""

    def __init__(self, loaded: LoadedInputs, target: SpeedTarget, folder: Path, precision: str):
        self.loaded, self.config, self.target, self.console = loaded, loaded.config, target, loaded.run.console
        self.trial_precision = choose_trial_precision(self.config, precision)
        self.timer = ShapeTimer(loaded, target, folder / SCRATCH / "exports")
        self.allowed_ms = dict(zip(self.config.budget.lengths, list_allowed_ms(loaded, target), strict=True))
        self.milliseconds = self.allowed_ms[self.config.budget.lengths[0]]

    @property
    def space(self) -> SearchSpace:
        """The space of shapes."""
        return self.timer.space

    def choose(self) -> JsonObject:
        """Finds a shape for the target and returns `shape.json`'s contents.

        Raises:
            InputError: No shape reaches the target, or its files are too large.
        """
        try:
            choice, trials = self.find_shape()
        except TooLargeError as error:
            return self.reject_target(str(error))
        if choice.is_exhausted:
            return self.reject_target(self.explain_missing_shape(choice))
        return self.describe_choice(choice, trials)

    def find_shape(self) -> tuple[MeasuredChoice, list[JsonObject]]:
        """Tries the candidates, measures the winner until it meets the target, and returns it with all trials.

        If no shape with the winner's layers and width is fast enough, or small enough, those of other layers and widths
        are tried; at last the smallest, unless files were too large.

        Raises:
            TooLargeError: The files of the shapes that were fast enough are too large.
        """
        milliseconds, too_large = self.milliseconds / AIM, None
        trials: list[JsonObject] = []
        while candidates := list_candidates(self.space, milliseconds):
            winner, divergences = self.run_trials(candidates)
            pairs = zip(candidates, divergences, strict=True)
            trials += [{"label": each.label, "divergences": values} for each, values in pairs]
            try:
                choice = self.timer.correct_latency(candidates[winner])
            except TooLargeError as error:  # which lowered the space's limit of bytes
                self.console.say(f"  shape-{self.target.name}: {error}; trying others")
                too_large = error
                continue
            if not choice.is_exhausted:
                return choice, trials
            self.console.say(
                f"  shape-{self.target.name}: no shape with the width and the layers of {choice.candidate.label} is "
                "fast enough; trying others"
            )
            milliseconds = min(choice.corrected_ms, milliseconds * (1 - TOLERANCE))  # less each time, so that it ends
        if too_large is not None:
            raise too_large
        return self.timer.correct_latency(make_smallest_candidate(self.space)), trials

    def describe_choice(self, choice: MeasuredChoice, trials: list[JsonObject]) -> JsonObject:
        """Returns `shape.json`'s contents."""
        last = choice.measurements[-1]
        return {
            "shape": choice.candidate.shape.to_dict(),
            "sizes": asdict(choice.candidate.sizes),
            "label": choice.candidate.label,
            "trials": trials,
            "measurements": choice.measurements,
            "teacher_score": self.loaded.teacher_outputs.score,
            **{name: last[name] for name in MEASURED},
        }

    def run_trials(self, candidates: Sequence[Candidate]) -> tuple[int, list[list[float]]]:
        """Returns the index of the candidate that learns best from the teacher, and the divergences of all trials."""
        if len(candidates) == 1 or not self.config.prune.trial_steps:
            best = min(range(len(candidates)), key=lambda number: candidates[number].loss)
            return best, [[] for _ in candidates]
        stages, task, data = self.loaded.stages, self.loaded.task, self.loaded.training_texts
        start = stages.begin(self.config, self.target.name, None)
        signals = open_cached_signals(stages.cache, start)
        trials = []
        for each in candidates:
            torch.manual_seed(self.loaded.run.seed)
            student = start.prune(self.loaded.model, self.loaded.axes, each.shape)
            train = start.adapt_training(self.config.train, student)
            if train.checkpointing == AUTO:  # the mode that always fits; the weights are the same
                train = replace(train, checkpointing=FULL)
            trials.append(
                Trial(
                    student,
                    data,
                    signals,
                    self.config.loss,
                    train,
                    task.output_rows,
                    device=choose_search_device(self.config.machine.accelerator),
                    precision=self.trial_precision,
                )
            )
        comparison = TeacherComparison(
            task,
            data.validation,
            data.pad_id,
            self.loaded.teacher_outputs,
            self.config.loss.resolved_temperature,
            COMPARED_SAMPLES,
        )
        winner, divergences = eliminate_trials(trials, comparison, self.config.prune.trial_steps, self.console)
        self.console.say(
            f"  shape-{self.target.name}: {len(candidates)} candidates tried, {candidates[winner].label} learns best "
            f"(distance from the teacher {divergences[winner][-1]:.3f})"
        )
        return winner, divergences

    def explain_missing_shape(self, smallest: MeasuredChoice) -> str:
        """Describes that not even the smallest possible shape reaches the target."""
        measured, budget = smallest.measurements[-1], self.config.budget
        length = measured["length"]
        texts = f" on texts of {length} tokens" if length else ""
        return (
            f"budget {self.target.name}: expected a shape that takes {self.allowed_ms[length]:.3f} ms per call{texts} "
            f"on {budget.runtime} {budget.precision}, found none: the smallest, {measured['label']}, reaches "
            f"{measured['pooled_speedup']:.1f}x, {measured['best_ms']:.3f} ms; request at most that"
            + ("" if budget.precision == "int8" else ", or int8 on onnxruntime (--budget.precision int8)")
        )

    def reject_target(self, reason: str) -> JsonObject:
        """Reports that the target has no shape.

        Raises:
            InputError: Always, but for the target of a frontier, for which the message is returned.
        """
        if not self.config.budget.frontier:
            raise InputError(reason)
        self.console.say(f"  shape-{self.target.name}: no pruned student: {reason}")
        return {UNREACHED: reason}
