"""The shape stage: searches the units to keep for a target speed, by short trainings and repeated measurements."""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.prune.budget import TOLERANCE, Budget
from compress.prune.importance.scores import Scores
from compress.prune.search.allocate import Limit
from compress.prune.search.candidates import Candidate, Space, candidates, reallocated, smallest
from distill.checkpoint.pruned import head_width, load_pruned
from distill.data.batches.data_module import TextDataModule
from distill.data.splits.labelled import Splits
from distill.errors import InputError
from distill.slicing import Axis, prune
from distill.tasks.task import Task
from pipelines.reports.pruning_summary import read_costs
from pipelines.runs.files import write_json
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.plan import Target
from pipelines.settings.schemes import is_dynamic_reduced
from pipelines.stages.budget_timing import Built, Texts, build, target_for, texts_of, time_together
from pipelines.stages.cache_writing import load_teacher
from pipelines.stages.data import read_data, read_task
from pipelines.stages.distill import SHAPE, PrunedStart, cached_signals, texts_module
from pipelines.stages.importance import SCORES
from pipelines.stages.prune_inputs import axes_of, read_sizes, rounding_key, timing_quantization
from pipelines.stages.recovery_rate import RULE
from pipelines.stages.scoring import Judge, SplitOutputs, compute_outputs
from pipelines.stages.teacher import MODEL
from pipelines.stages.trials import Trial, eliminate
from pipelines.stages.vocabulary import tokenizer_of

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
MEASUREMENTS = 3, 8  # minimum and maximum number of measurements of a search
AIM = 1.015  # times the target speed, so that noise rarely pushes the result below the target
ROUNDS = 60  # about half a minute, because noise on a shared machine fluctuates slowly


@dataclass(frozen=True)
class Inputs:
    """The stages that a shape search takes as input."""

    data: Artefact
    teacher: Artefact
    cache: Artefact
    words: Artefact
    start: Artefact
    scores: Artefact
    costs: Artefact

    def named(self) -> dict[str, Artefact]:
        return dict(vars(self))


def shape_stage(run: Run, config: DistillConfig, given: Inputs, target: Target) -> Artefact:
    """Writes `shape.json`: the units that are kept, each candidate's trial results, and all measurements."""
    settings = {
        "target": asdict(target),
        "budget": asdict(config.budget) | {"speedup": "", "latency_ms": 0, "max_bytes": "", "min_score": 0},
        "trials": config.prune.trials,
        "train": {name: getattr(config.train, name) for name in TRAINED} | {"rate": RULE},
        "loss": vars(config.loss.without_layer_terms),
        "max_length": config.data.max_length,
        "scheme": rounding_key(config),
    }

    def work(folder: Path) -> dict[str, Any]:
        search = Search(run, config, given, target, folder)
        found = search.choose()
        write_json(folder / SHAPE, found)
        return {name: found[name] for name in (*FINAL, "outline", "teacher_score")}

    return run.stage(f"shape-{target.name}", settings, given.named(), work, version=VERSION)


FINAL = ("speedup", "by_all", "best_ms", "teacher_ms", "bytes")  # of the last measurement
TRAINED = ("learning_rate", "batch_size", "weight_decay", "max_grad_norm", "head_rate", "dropout", "freeze_embeddings")


class Search:
    """The search for the shape of a single target; data, texts and teacher are loaded on first use."""

    def __init__(self, run: Run, config: DistillConfig, given: Inputs, target: Target, folder: Path):
        self.run, self.config, self.given, self.target = run, config, given, target
        self.budget: Budget = config.budget
        self.scratch = folder / SCRATCH / "exports"
        self.model: PreTrainedModel = load_pruned(given.start.folder / MODEL)
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(given.start.folder / MODEL)
        self.axes: Sequence[Axis] = axes_of(self.model, self.task)
        costs, self.teacher_ms = read_costs(given.costs)
        scores = Scores.load(given.scores.folder / SCORES, self.model)
        size = Limit(read_sizes(given.costs), target.most_bytes) if target.most_bytes else None
        self.space = Space(self.axes, scores, costs, head_width(self.model.config), self.budget.uniform, size)

    @cached_property
    def splits(self) -> Splits:
        return read_data(self.given.data)

    @cached_property
    def task(self) -> Task:
        return read_task(self.given.data)

    @cached_property
    def data(self) -> TextDataModule:
        return texts_module(self.run, self.config, self.splits, self.tokenizer, task=self.task)

    @cached_property
    def texts(self) -> Texts:
        length = self.config.data.max_length
        return texts_of(self.splits.validation, self.budget, length, self.run.seed, self.task)

    @cached_property
    def teacher(self) -> Built:
        """Builds the teacher's files for timing; every candidate is measured beside the same files."""
        source = self.given.teacher.folder / MODEL
        reference = target_for(self.budget, teacher=True)
        return build(load_pruned(source), tokenizer_of(source), reference, self.scratch / "teacher", self.texts)

    def choose(self) -> dict[str, Any]:
        """Tries the candidates, measures the winner until it meets the target, and returns `shape.json`'s contents."""
        wanted = self.target.milliseconds(self.teacher_ms) / AIM
        found = candidates(self.space, wanted)
        if not found:
            self.refuse(wanted)
        winner, trials = self.run_trials(found)
        chosen, measured = self.correct_latency(found[winner])
        said: dict[str, Any] = {
            "shape": chosen.shape.to_dict(),
            "outline": asdict(chosen.outline),
            "label": chosen.label,
            "trials": [{"label": c.label, "divergences": t} for c, t in zip(found, trials, strict=True)],
            "measurements": measured,
        }
        said["teacher_score"] = self.teacher_outputs.score
        return said | {name: measured[-1][name] for name in FINAL}

    def run_trials(self, found: Sequence[Candidate]) -> tuple[int, list[list[float]]]:
        """Returns the index of the candidate that learns best from the teacher, and the divergences of all trials."""
        if len(found) == 1 or not self.config.prune.trials:
            best = min(range(len(found)), key=lambda number: found[number].loss)
            return best, [[] for _ in found]
        start = PrunedStart(self.target.name, self.given.start, None, self.given.words)
        signals = cached_signals(self.given.cache, start)
        trials = []
        for each in found:
            torch.manual_seed(self.run.seed)
            student = prune(self.model, self.axes, each.shape)
            train = start.training(self.config.train, student)
            trials.append(Trial(student, self.data, signals, self.config.loss, train, self.task.answers))
        judge = Judge(
            self.task,
            self.data.validation,
            self.data.pad_id,
            self.teacher_outputs,
            self.config.loss.resolved_temperature,
        )
        winner, divergences = eliminate(trials, judge, self.config.prune.trials, self.run.console)
        self.run.console.say(
            f"  shape-{self.target.name}: {len(found)} candidates tried, {found[winner].label} learns best "
            f"(KL {divergences[winner][-1]:.3f})"
        )
        return winner, divergences

    @cached_property
    def teacher_outputs(self) -> SplitOutputs:
        """Computes the teacher's outputs on the validation split."""
        source = self.given.teacher.folder / MODEL
        model, tokenizer = load_teacher(source), tokenizer_of(source)
        own = self.task.encode(tokenizer, self.splits.validation, self.config.data.max_length)
        return compute_outputs(
            model, own, int(tokenizer.pad_token_id or 0), self.task, self.config.loss.resolved_temperature
        )

    def build_candidate(self, chosen: Candidate) -> Built:
        """Returns the candidate's files as they will be deployed."""
        place = self.scratch / "candidate"
        shutil.rmtree(place, ignore_errors=True)
        model = prune(self.model, self.axes, chosen.shape, uniform=self.budget.uniform)
        how, reduced = timing_quantization(self.config), is_dynamic_reduced(self.config)
        return build(model, self.tokenizer, target_for(self.budget), place, self.texts, how, reduced=reduced)

    def within(self, chosen: Candidate) -> tuple[Candidate, Built]:
        """Returns the candidate and its files, with fewer units if the files exceed the byte limit."""
        built, most = self.build_candidate(chosen), self.target.most_bytes
        while most is not None and built.bytes > most and self.space.size is not None:
            costs = self.space.size.costs
            limit = Limit(costs, costs.predict(chosen.outline) - (built.bytes - most))
            self.space = replace(self.space, size=limit)
            smaller = reallocated(self.space, chosen, chosen.choice.milliseconds)
            if smaller is None:
                break
            chosen, built = smaller, self.build_candidate(smaller)
        return chosen, built

    def measured(self, chosen: Candidate, built: Built) -> dict[str, Any]:
        """Times the candidate alternately with the teacher."""
        times = time_together({"teacher": self.teacher, "student": built}, self.budget, ROUNDS)
        teacher, student = times["teacher"].best_ms, times["student"].best_ms
        return {
            "label": chosen.label,
            "teacher_ms": teacher,
            "best_ms": student,
            "speedup": teacher / student,
            "bytes": built.bytes,
        }

    def correct_latency(self, chosen: Candidate) -> tuple[Candidate, list[dict[str, Any]]]:
        """Measures the candidate and adjusts the solver's latency budget until the requested speed is met.

        A single measurement on a shared machine is off by a few percent. Shapes as similar as these deviate from the
        solver's prediction by the same factor, so each measurement yields an estimate of the correct budget, and the
        mean of the estimates is used.
        """
        found: list[dict[str, Any]] = []
        right: list[float] = []  # milliseconds to request of the solver, estimated from each measurement
        (chosen, built), (least, most) = self.within(chosen), MEASUREMENTS
        while True:
            result = self.measured(chosen, built)
            expected = chosen.choice.milliseconds
            right.append(expected * self.reached(result))
            wanted = statistics.geometric_mean(right)
            ratio = wanted / expected
            found.append(result | {"by_all": result["speedup"] * ratio / self.reached(result)})
            self.run.console.say(
                f"  shape-{self.target.name}: {chosen.label}: {result['best_ms']:.3f} ms, {result['speedup']:.2f}x; "
                f"{found[-1]['by_all']:.2f}x by all measurements"
            )
            if len(found) == most or (len(found) >= least and 1 <= ratio <= 1 + TOLERANCE / 2):
                break
            better = reallocated(self.space, chosen, wanted / AIM)
            if better is None or (better.outline == chosen.outline and len(found) >= least):
                break
            if better.outline != chosen.outline:
                chosen, built = self.within(better)
        self.check_bytes(found[-1])
        if ratio < 1 - TOLERANCE:
            self.run.console.say(
                f"  shape-{self.target.name}: the target was missed: {found[-1]['by_all']:.2f}x, {ratio:.0%} of what "
                "was asked for; a busy machine makes measurements uncertain"
            )
        return chosen, found

    def reached(self, result: dict[str, Any]) -> float:
        """Returns the measured speed relative to the requested speed."""
        if self.target.latency_ms:
            return self.target.latency_ms / result["best_ms"]
        return result["speedup"] / self.target.speedup

    def check_bytes(self, result: dict[str, Any]) -> None:
        """Checks the size of the measured files.

        Raises:
            InputError: The files are larger than the budget allows.
        """
        most = self.target.most_bytes
        if most is not None and result["bytes"] > most:
            raise InputError(
                f"budget.max_bytes {most / 1e6:g}MB: the best point reached, {result['label']}, takes "
                f"{result['bytes'] / 1e6:.1f} MB at {result['speedup']:.1f}x; --budget.precision int8, "
                "--prune.unseen 1 (fewer words) and --prune.embedding_rank (a narrower word table) make it smaller"
            )

    def refuse(self, wanted: float) -> None:
        """Measures the smallest possible shape and reports the target as unreachable.

        Raises:
            InputError: Always.
        """
        least = smallest(self.space)
        result = self.measured(least, self.build_candidate(least))
        self.check_bytes(result)
        raise InputError(
            f"budget {self.target.name}: not reached on {self.budget.runtime} {self.budget.precision}; it would take "
            f"{wanted * AIM:.3f} ms a call. The best point reached: {least.label} at {result['speedup']:.1f}x, "
            f"{result['best_ms']:.3f} ms; ask for at most that"
            + ("" if self.budget.precision == "int8" else ", or for int8 on onnxruntime (--budget.precision int8)")
        )
