"""Measurement of shapes beside the teacher, with fewer units until they are as small and as fast as requested."""

import math
import shutil
import statistics
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from compress.prune.budget import TOLERANCE
from compress.prune.importance.scores import Scores
from compress.prune.search.allocate import Limit
from compress.prune.search.candidates import Candidate, SearchSpace, reallocate
from compress.quantize.schemes import SCHEMES
from distill.checkpoint.custom_models import head_width
from distill.errors import InputError
from distill.slicing import prune
from pipelines.runs.manifest import JsonObject
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import SpeedTarget
from pipelines.settings.schemes import list_schemes
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prune.budget_timing import TimedModel, TimingTexts, draw_texts, time_together
from pipelines.stages.prune.costs import fit_size_model
from pipelines.stages.prune.deployed_models import build_timed_student, build_timed_teacher
from pipelines.stages.prune.importance import SCORES
from pipelines.stages.prune.shape_inputs import LoadedInputs

MEASUREMENTS = 3, 8  # minimum and maximum number of measurements of a search
AIM = 1.015  # times the target speed, because measurements differ by a few percent from one minute to the next
CANDIDATE_ROUNDS = 3  # times the budget's: half a minute, because noise on a shared machine fluctuates slowly


class TooLargeError(InputError):
    """The files of the shape that was found are larger than the budget allows."""


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


class ShapeTimer:
    """Measures the shapes for a target as they will be deployed, each beside the same files of the teacher."""

    def __init__(self, loaded: LoadedInputs, target: SpeedTarget, scratch: Path):
        self.loaded, self.target, self.scratch = loaded, target, scratch
        self.budget, self.console = loaded.config.budget, loaded.run.console
        self.space = build_space(loaded, target)  # with a lower limit of bytes once a shape's files have exceeded it

    @cached_property
    def texts(self) -> TimingTexts:
        """The texts that models are timed on."""
        loaded = self.loaded
        return draw_texts(
            loaded.splits.validation, self.budget, loaded.config.data.max_length, loaded.run.seed, loaded.task
        )

    @cached_property
    def teacher(self) -> TimedModel:
        """The teacher's files."""
        return build_timed_teacher(self.loaded.stages.teacher.folder / MODEL, self.scratch / "teacher", self.texts)

    def build_candidate(self, candidate: Candidate) -> TimedModel:
        """Returns the candidate's files as they will be deployed."""
        folder = self.scratch / "candidate"
        shutil.rmtree(folder, ignore_errors=True)
        model = prune(self.loaded.model, self.loaded.axes, candidate.shape, uniform=self.budget.uniform)
        return build_timed_student(model, self.loaded.tokenizer, self.loaded.config, folder, self.texts)

    def fit_bytes(self, candidate: Candidate) -> TimedCandidate:
        """Returns the candidate and its files, with fewer units if the files exceed the byte limit."""
        model, max_bytes = self.build_candidate(candidate), self.target.max_bytes
        while max_bytes is not None and model.bytes > max_bytes and self.space.size is not None:
            costs = self.space.size.costs
            # The limit falls each time, so that searches with it end.
            predicted = min(costs.predict(candidate.sizes), self.space.size.maximum)
            limit = Limit(costs, predicted - (model.bytes - max_bytes))
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
        times = time_together(models, self.budget, length, rounds, self.console, label)
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
            measured["pooled_speedup"] = measured["speedup"] * ratio / self.relative_speed(measured)
            measurements.append(measured)
            self.report_measurement(candidate, measured)
            if len(measurements) == most or (len(measurements) >= least and abs(ratio / AIM - 1) <= TOLERANCE / 2):
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
            self.console.say(
                f"  shape-{self.target.name}: the target was missed: {measured['pooled_speedup']:.2f}x, {ratio:.0%} of "
                "the requested speed; measurements on a busy machine are unreliable"
            )
        return MeasuredChoice(candidate, measurements, corrected / AIM, is_exhausted)

    def report_measurement(self, candidate: Candidate, measured: JsonObject) -> None:
        """Prints a measurement, and the speed by all measurements so far."""
        self.console.say(
            f"  shape-{self.target.name}: {candidate.label}: {measured['best_ms']:.3f} ms, {measured['speedup']:.2f}x; "
            f"{measured['pooled_speedup']:.2f}x by all measurements"
        )

    def relative_speed(self, measured: JsonObject) -> float:
        """Returns the measured speed relative to the requested speed."""
        return self.target.share_reached(measured["speedup"], measured["best_ms"])

    def check_bytes(self, measured: JsonObject) -> None:
        """Checks the size of the measured files.

        Raises:
            TooLargeError: The files are larger than the budget allows.
        """
        max_bytes = self.target.max_bytes
        if max_bytes is not None and measured["bytes"] > max_bytes:
            raise TooLargeError(
                f"budget.max_bytes: expected at most {max_bytes / 1e6:g} MB, found {measured['bytes'] / 1e6:.1f} MB "
                f"for the best shape, {measured['label']}, at {measured['speedup']:.1f}x; --budget.precision int8, "
                "--prune.max_split_share 1 (fewer tokens) and --prune.embedding_rank (narrower embeddings) make it "
                "smaller"
            )


def list_allowed_ms(loaded: LoadedInputs, target: SpeedTarget) -> list[float]:
    """Returns the milliseconds per call that a target allows, for each length of the budget."""
    return [target.milliseconds(each.teacher_ms) for each in loaded.costs]


def build_space(loaded: LoadedInputs, target: SpeedTarget) -> SearchSpace:
    """Returns the space of a target's shapes; costs at further lengths are scaled to what the first length allows."""
    allowed = list_allowed_ms(loaded, target)
    pairs = zip(loaded.costs, allowed, strict=True)
    scaled = [each.costs.scale(allowed[0] / milliseconds) for each, milliseconds in pairs]
    scores = Scores.load(loaded.stages.scores.folder / SCORES, loaded.model)
    size = Limit(fit_size_model(loaded.stages.costs), target.max_bytes) if target.max_bytes else None
    width, ffn_multiple = head_width(loaded.model.config), find_ffn_multiple(loaded.config)
    return SearchSpace(loaded.axes, scores, scaled, width, loaded.config.budget.uniform, size, ffn_multiple)


def find_ffn_multiple(config: DistillConfig) -> int:
    """Returns the number that has to divide a layer's neurons, for the quantization and the sparsity of the students.

    Neurons are outputs of one layer and inputs of the next.
    """
    quantized = [SCHEMES[name].input_divisor for name in list_schemes(config)]
    sparse = config.sparsity.build_schedule(1).divisors if config.sparsity.requested else ()
    return math.lcm(*quantized, *sparse)


def ffn_settings(config: DistillConfig) -> JsonObject:
    """Returns the multiple of neurons for stage keys, from which it is missing where there is none."""
    multiple = find_ffn_multiple(config)
    return {"ffn_multiple": multiple} if multiple > 1 else {}
