"""The shape stage: searches the units to keep for a target speed, by short trainings and repeated measurements."""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.prune.budget import TOLERANCE, Budget
from compress.prune.importance.scores import Scores
from compress.prune.search.allocate import Limit
from compress.prune.search.candidates import (
    Candidate,
    SearchSpace,
    list_candidates,
    make_smallest_candidate,
    reallocate,
)
from distill.checkpoint.custom_models import head_width, load_model_folder
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.packing import find_padding_id
from distill.data.splits.examples import Splits
from distill.errors import InputError
from distill.slicing import Axis, prune
from distill.tasks.task import Task
from pipelines.reports.pruning_summary import UNREACHED, read_costs
from pipelines.runs.files import write_json
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import SpeedTarget
from pipelines.settings.schemes import reduces_range_of_dynamic_int8
from pipelines.stages.cache.writing import load_teacher
from pipelines.stages.deliver.exported_targets import target_for
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import SplitOutputs, TeacherComparison, compute_outputs
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.prune.budget_timing import (
    TimedModel,
    TimingTexts,
    build_timed,
    draw_texts,
    time_together,
)
from pipelines.stages.prune.costs import fit_size_model, rounding_key, timing_quantization
from pipelines.stages.prune.importance import SCORES
from pipelines.stages.prune.start import find_prunable_axes
from pipelines.stages.prune.trials import Trial, eliminate_trials
from pipelines.stages.train.pruned_start import SHAPE, PrunedStart
from pipelines.stages.train.recovery_rate import RULE
from pipelines.stages.train.training_inputs import build_training_texts, open_cached_signals

VERSION = 5  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
MEASUREMENTS = 3, 8  # minimum and maximum number of measurements of a search
AIM = 1.015  # times the target speed, so that noise rarely pushes the result below the target
MEASURED = ("speedup", "by_all", "best_ms", "teacher_ms", "bytes")  # of the last measurement
COMPARED_SAMPLES = 2048  # of the validation split, by which the trials are compared: all candidates on the same ones
TRIAL_SETTINGS = (
    "learning_rate", "batch_size", "weight_decay", "max_grad_norm", "head_rate", "dropout", "freeze_embeddings",
)  # fmt: skip
CANDIDATE_ROUNDS = 3  # times the budget's: half a minute, because noise on a shared machine fluctuates slowly


@dataclass(frozen=True)
class ShapeInputs:
    """The stages that a shape search takes as input."""

    data: Artefact
    teacher: Artefact
    cache: Artefact
    tokens: Artefact
    start: Artefact
    scores: Artefact
    costs: Artefact

    def begin(self, config: DistillConfig, name: str, shape: Artefact | None) -> PrunedStart:
        """Returns the start of a student's training, with a shape that the search has chosen, or None before it has."""
        return PrunedStart(name, self.start, shape, self.tokens, self.scores if config.prune.reconstruct else None)

    def by_name(self) -> dict[str, Artefact]:
        """Returns the stages by their names in stage keys, which mustn't change: finished runs would be rebuilt."""
        return {"words" if name == "tokens" else name: stage for name, stage in vars(self).items()}


def shape_stage(run: Run, config: DistillConfig, inputs: ShapeInputs, target: SpeedTarget) -> Artefact:
    """Writes `shape.json`: the units that are kept, each candidate's trial results, and all measurements."""

    def work(folder: Path) -> JsonObject:
        return write_shape(folder, ShapeSearch(run, config, inputs, target, folder).choose())

    settings = describe_search(config, target)
    return run.stage(f"shape-{target.name}", settings, inputs.by_name(), work, version=VERSION)


def describe_search(config: DistillConfig, target: SpeedTarget) -> JsonObject:
    """Returns the target and the settings of its search, for stage keys."""
    return describe_measuring(config, target) | {
        "trials": config.prune.trial_steps,
        "train": {name: getattr(config.train, name) for name in TRIAL_SETTINGS} | {"rate": RULE},
        "loss": vars(config.loss.without_layer_terms),
    }


def describe_measuring(config: DistillConfig, target: SpeedTarget) -> JsonObject:
    """Returns the target and the settings of its measurements, for stage keys."""
    return {
        "target": asdict(target),
        "budget": config.budget.timing_settings() | {"uniform": config.budget.uniform},
        "max_length": config.data.max_length,
        "scheme": rounding_key(config),
    }


def write_shape(folder: Path, result: JsonObject) -> JsonObject:
    """Writes `shape.json` and returns the metrics of its stage."""
    write_json(folder / SHAPE, result)
    return {name: result[name] for name in (*MEASURED, "sizes", "teacher_score", UNREACHED) if name in result}


class TimedCandidate(NamedTuple):
    """A candidate and its files as they will be deployed."""

    candidate: Candidate
    model: TimedModel


@dataclass(frozen=True)
class MeasuredChoice:
    """A shape that was measured for the target.

    Args:
        candidate: The last shape that was measured.
        measurements: The measurements, the last one of that shape.
        corrected_ms: The solver's latency budget for the target in milliseconds, corrected by all measurements.
        is_exhausted: Whether it is too slow and no faster shape has these layers and this width.
    """

    candidate: Candidate
    measurements: list[JsonObject]
    corrected_ms: float
    is_exhausted: bool


class ShapeSearch:
    """The search for the shape of a single target; data, texts and teacher are loaded on first use."""

    def __init__(self, run: Run, config: DistillConfig, inputs: ShapeInputs, target: SpeedTarget, folder: Path):
        self.run, self.config, self.inputs, self.target = run, config, inputs, target
        self.budget: Budget = config.budget
        self.scratch = folder / SCRATCH / "exports"
        self.model: PreTrainedModel = load_model_folder(inputs.start.folder / MODEL)
        self.tokenizer: PreTrainedTokenizerBase = load_student_tokenizer(inputs.start.folder / MODEL)
        self.axes: Sequence[Axis] = find_prunable_axes(self.model, self.task)
        costs = read_costs(inputs.costs)
        allowed = [target.milliseconds(each.teacher_ms) for each in costs]
        self.milliseconds = allowed[0]  # at the first length of the budget; costs at the others are scaled to it
        scaled = [
            each.costs.scale(allowed[0] / milliseconds) for each, milliseconds in zip(costs, allowed, strict=True)
        ]
        scores = Scores.load(inputs.scores.folder / SCORES, self.model)
        size = Limit(fit_size_model(inputs.costs), target.max_bytes) if target.max_bytes else None
        self.space = SearchSpace(self.axes, scores, scaled, head_width(self.model.config), self.budget.uniform, size)

    @cached_property
    def splits(self) -> Splits:
        """The data's splits."""
        return read_data(self.inputs.data)

    @cached_property
    def task(self) -> Task:
        """The task, with its labels."""
        return read_task(self.inputs.data)

    @cached_property
    def data(self) -> TextDataModule:
        """The texts that trials train on."""
        return build_training_texts(self.run, self.config, self.splits, self.tokenizer, task=self.task)

    @cached_property
    def texts(self) -> TimingTexts:
        """The texts that models are timed on."""
        length = self.config.data.max_length
        return draw_texts(self.splits.validation, self.budget, length, self.run.seed, self.task)

    @cached_property
    def teacher(self) -> TimedModel:
        """The teacher's files; every candidate is measured beside the same files."""
        source = self.inputs.teacher.folder / MODEL
        reference = target_for(self.budget, teacher=True)
        return build_timed(
            load_model_folder(source), load_student_tokenizer(source), reference, self.scratch / "teacher", self.texts
        )

    def choose(self) -> JsonObject:
        """Finds a shape for the target and returns `shape.json`'s contents.

        Raises:
            InputError: No shape reaches the target, or its files are too large.
        """
        choice, trials = self.find_shape()
        return self.refuse_target(choice) if choice.is_exhausted else self.describe_choice(choice, trials)

    def find_shape(self) -> tuple[MeasuredChoice, list[JsonObject]]:
        """Tries the candidates, measures the winner until it meets the target, and returns it with all trials.

        If no shape with the winner's layers and width is fast enough, those of other layers and widths are tried, at
        last the smallest.
        """
        milliseconds = self.milliseconds / AIM
        trials: list[JsonObject] = []
        while candidates := list_candidates(self.space, milliseconds):
            winner, divergences = self.run_trials(candidates)
            pairs = zip(candidates, divergences, strict=True)
            trials += [{"label": each.label, "divergences": values} for each, values in pairs]
            choice = self.correct_latency(candidates[winner])
            if not choice.is_exhausted:
                return choice, trials
            self.run.console.say(
                f"  shape-{self.target.name}: no shape with the width and the layers of {choice.candidate.label} is "
                "fast enough; trying others"
            )
            milliseconds = min(choice.corrected_ms, milliseconds * (1 - TOLERANCE))  # less each time, so that it ends
        return self.correct_latency(make_smallest_candidate(self.space)), trials

    def describe_choice(self, choice: MeasuredChoice, trials: list[JsonObject]) -> JsonObject:
        """Returns `shape.json`'s contents."""
        last = choice.measurements[-1]
        return {
            "shape": choice.candidate.shape.to_dict(),
            "sizes": asdict(choice.candidate.sizes),
            "label": choice.candidate.label,
            "trials": trials,
            "measurements": choice.measurements,
            "teacher_score": self.teacher_outputs.score,
            **{name: last[name] for name in MEASURED},
        }

    def run_trials(self, candidates: Sequence[Candidate]) -> tuple[int, list[list[float]]]:
        """Returns the index of the candidate that learns best from the teacher, and the divergences of all trials."""
        if len(candidates) == 1 or not self.config.prune.trial_steps:
            best = min(range(len(candidates)), key=lambda number: candidates[number].loss)
            return best, [[] for _ in candidates]
        start = self.inputs.begin(self.config, self.target.name, None)
        signals = open_cached_signals(self.inputs.cache, start)
        trials = []
        for each in candidates:
            torch.manual_seed(self.run.seed)
            student = start.cut(self.model, self.axes, each.shape)
            train = start.adapt_training(self.config.train, student)
            trials.append(Trial(student, self.data, signals, self.config.loss, train, self.task.output_rows))
        comparison = TeacherComparison(
            self.task,
            self.data.validation,
            self.data.pad_id,
            self.teacher_outputs,
            self.config.loss.resolved_temperature,
            COMPARED_SAMPLES,
        )
        winner, divergences = eliminate_trials(trials, comparison, self.config.prune.trial_steps, self.run.console)
        self.run.console.say(
            f"  shape-{self.target.name}: {len(candidates)} candidates tried, {candidates[winner].label} learns best "
            f"(KL {divergences[winner][-1]:.3f})"
        )
        return winner, divergences

    @cached_property
    def teacher_outputs(self) -> SplitOutputs:
        """The teacher's outputs on the validation split."""
        source = self.inputs.teacher.folder / MODEL
        model, tokenizer = load_teacher(source), load_student_tokenizer(source)
        rows = self.task.encode(tokenizer, self.splits.validation, self.config.data.max_length)
        return compute_outputs(
            model, rows, find_padding_id(tokenizer), self.task, self.config.loss.resolved_temperature
        )

    def build_candidate(self, candidate: Candidate) -> TimedModel:
        """Returns the candidate's files as they will be deployed."""
        folder = self.scratch / "candidate"
        shutil.rmtree(folder, ignore_errors=True)
        model = prune(self.model, self.axes, candidate.shape, uniform=self.budget.uniform)
        quantization, reduce_range = timing_quantization(self.config), reduces_range_of_dynamic_int8(self.config)
        target = target_for(self.budget)
        return build_timed(model, self.tokenizer, target, folder, self.texts, quantization, reduce_range=reduce_range)

    def fit_bytes(self, candidate: Candidate) -> TimedCandidate:
        """Returns the candidate and its files, with fewer units if the files exceed the byte limit."""
        model, max_bytes = self.build_candidate(candidate), self.target.max_bytes
        while max_bytes is not None and model.bytes > max_bytes and self.space.size is not None:
            costs = self.space.size.costs
            limit = Limit(costs, costs.predict(candidate.sizes) - (model.bytes - max_bytes))
            self.space = replace(self.space, size=limit)
            smaller = reallocate(self.space, candidate, candidate.allocation.milliseconds)
            if smaller is None:
                break
            candidate, model = smaller, self.build_candidate(smaller)
        return TimedCandidate(candidate, model)

    def measure(self, candidate: Candidate, model: TimedModel) -> JsonObject:
        """Times the candidate alternately with the teacher; of several lengths, returns the slowest for its target."""
        measured = [self.measure_length(length, candidate, model) for length in self.budget.lengths]
        return min(measured, key=self.relative_speed)

    def measure_length(self, length: int, candidate: Candidate, model: TimedModel) -> JsonObject:
        """Times the candidate alternately with the teacher on texts of a length."""
        rounds = CANDIDATE_ROUNDS * self.budget.rounds
        label = f"shape-{self.target.name}: timing {candidate.label}{f' on {length} tokens' if length else ''}"
        models = {"teacher": self.teacher, "student": model}
        times = time_together(models, self.budget, length, rounds, self.run.console, label)
        teacher, student = times["teacher"].best_ms, times["student"].best_ms
        return {
            "label": candidate.label,
            "length": length,
            "teacher_ms": teacher,
            "best_ms": student,
            "speedup": teacher / student,
            "bytes": model.bytes,
        }

    def correct_latency(self, candidate: Candidate) -> MeasuredChoice:
        """Measures the candidate and adjusts the solver's latency budget until the requested speed is met.

        A single measurement on a shared machine is off by a few percent. Shapes as similar as these deviate from the
        solver's prediction by the same factor, so each measurement yields an estimate of the correct budget, and the
        mean of the estimates is used.
        """
        measurements: list[JsonObject] = []
        estimates: list[float] = []  # milliseconds to request of the solver, one from each measurement
        (candidate, model), (least, most) = self.fit_bytes(candidate), MEASUREMENTS
        while True:
            measured = self.measure(candidate, model)
            predicted = candidate.allocation.milliseconds
            estimates.append(predicted * self.relative_speed(measured))
            corrected = statistics.geometric_mean(estimates)
            ratio = corrected / predicted
            measured["by_all"] = measured["speedup"] * ratio / self.relative_speed(measured)
            measurements.append(measured)
            self.report_measurement(candidate, measured)
            if len(measurements) == most or (len(measurements) >= least and 1 <= ratio <= 1 + TOLERANCE / 2):
                break
            better = reallocate(self.space, candidate, corrected / AIM) or candidate
            if better.sizes != candidate.sizes:
                candidate, model = self.fit_bytes(better)
            elif len(measurements) >= least:
                break
        self.check_bytes(measurements[-1])
        missed = ratio < 1 - TOLERANCE
        is_exhausted = missed and reallocate(self.space, candidate, corrected / AIM) is None
        if missed and not is_exhausted:
            self.run.console.say(
                f"  shape-{self.target.name}: the target was missed: {measurements[-1]['by_all']:.2f}x, {ratio:.0%} of "
                "the requested speed; measurements on a busy machine are unreliable"
            )
        return MeasuredChoice(candidate, measurements, corrected / AIM, is_exhausted)

    def report_measurement(self, candidate: Candidate, measured: JsonObject) -> None:
        """Prints a measurement, and the speed by all measurements so far."""
        self.run.console.say(
            f"  shape-{self.target.name}: {candidate.label}: {measured['best_ms']:.3f} ms, {measured['speedup']:.2f}x; "
            f"{measured['by_all']:.2f}x by all measurements"
        )

    def relative_speed(self, measured: JsonObject) -> float:
        """Returns the measured speed relative to the requested speed."""
        return self.target.share_reached(measured["speedup"], measured["best_ms"])

    def check_bytes(self, measured: JsonObject) -> None:
        """Checks the size of the measured files.

        Raises:
            InputError: The files are larger than the budget allows.
        """
        max_bytes = self.target.max_bytes
        if max_bytes is not None and measured["bytes"] > max_bytes:
            raise InputError(
                f"budget.max_bytes: expected at most {max_bytes / 1e6:g} MB, found {measured['bytes'] / 1e6:.1f} MB "
                f"for the best shape, {measured['label']}, at {measured['speedup']:.1f}x; --budget.precision int8, "
                "--prune.unseen 1 (fewer tokens) and --prune.embedding_rank (narrower embeddings) make it smaller"
            )

    def refuse_target(self, smallest: MeasuredChoice) -> JsonObject:
        """Reports that not even the smallest possible shape reaches the target.

        Raises:
            InputError: Always, but for the target of a frontier, for which the message is returned.
        """
        measured = smallest.measurements[-1]
        reason = (
            f"budget {self.target.name}: expected a shape that takes {self.milliseconds:.3f} ms per call on "
            f"{self.budget.runtime} {self.budget.precision}, found none: the smallest, {measured['label']}, reaches "
            f"{measured['by_all']:.1f}x, {measured['best_ms']:.3f} ms; request at most that"
            + ("" if self.budget.precision == "int8" else ", or int8 on onnxruntime (--budget.precision int8)")
        )
        if not self.budget.frontier:
            raise InputError(reason)
        self.run.console.say(f"  shape-{self.target.name}: no pruned student: {reason}")
        return {UNREACHED: reason}
