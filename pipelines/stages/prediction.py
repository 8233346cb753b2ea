"""Predicted memory and time of a run's stages: the same stages, run for one epoch on a sample of the data."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from compress.prune.config import PruneConfig
from distill.data.clean.config import format_step
from distill.data.sources.text_batches import find_large_text, stream_texts
from distill.data.sources.text_files import read_texts
from distill.data.splits.examples import Splits, take_rows
from distill.errors import InputError
from distill.train.config import TrainConfig
from pipelines.runs.console import CALLS, EXAMPLES, STEPS, TEXTS, Advance, Console
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.attention_free_names import name_attention_free_students
from pipelines.settings.commands.distill import DistillConfig, GeneralConfig
from pipelines.settings.plan import RunPlan, list_targets
from pipelines.stages.deliver.timing import is_evaluation
from pipelines.stages.prepare.compared_texts import measure_lengths
from pipelines.stages.prepare.data import SPLIT_NAMES, read_data_folder, write_splits
from pipelines.stages.prune.budget_timing import limit_rounds
from pipelines.stages.prune.shape_timing import CANDIDATE_ROUNDS
from pipelines.stages.run_stages import run_stages
from pipelines.stages.students import plan_epochs

RANDOM_BATCHES = 16  # of random texts in the sample, beside one of the longest texts
ROUNDS, TRIAL_STEPS = 3, 15  # at most, of timing and of a search's last trials
SAMPLED_SHARE = 0.5  # of the rows of a sample, of which a small share may leave a class without rows
CHARACTERS_PER_TOKEN = 4  # approximately


@dataclass(frozen=True)
class Prediction:
    """What a stage is predicted to take.

    Args:
        stage: Name of the stage.
        peak: Bytes that a process holds at most.
        seconds: Wall-clock time.
    """

    stage: str
    peak: int
    seconds: float


def predict_stages(plan: RunPlan, console: Console) -> tuple[list[Prediction], str]:
    """Returns predictions of the stages up to the evaluation, or those before a budget that can't be met, and why.

    The sample has a batch of the longest texts, which the peak depends on. The time of work on texts is scaled to all
    of them by their characters, and to all epochs; that of timing and of trials to all rounds and steps.
    """
    with TemporaryDirectory(prefix="stillroom-") as folder:
        short = shorten_plan(plan)
        run = SampledRun(Path(folder) / "run", plan.settings, short.settings)
        if plan.settings.general.data:
            sample = sample_text(plan.settings.general, Path(folder) / "text")
            run.text_scale = sample.scale
            short = replace(short, settings=replace(short.settings, general=sample.apply(short.settings.general)))
        try:
            with console.track("predicting", len(plan.stages), "stages") as run.on_stage:
                run_stages(run, short)
        except InputError as error:
            if "costs" not in [each.stage for each in run.predictions]:
                raise
            return run.predictions, str(error)
        return run.predictions, ""


def shorten_plan(plan: RunPlan) -> RunPlan:
    """Returns the plan with one epoch of every training, few rounds of timing and few steps of trials."""
    s = plan.settings
    cleaned_by = [step for step in s.clean.find_steps() if step.name != "labels"]  # a sample has too few rows
    of_student = {"oneshot": 1, "iterative": s.prune.rounds, "gradual": 2}[s.prune.schedule]
    settings = replace(
        s,
        train=shorten_training(s.train, of_student if s.budget.requested else 1),
        teacher_train=shorten_training(s.teacher_train),
        attention_free_train=shorten_training(s.attention_free_train),
        general=replace(s.general, train=shorten_training(s.general.train)),
        select=replace(s.select, share=SAMPLED_SHARE, rows=0) if s.select.requested else s.select,
        clean=replace(s.clean, steps=",".join(map(format_step, cleaned_by))),
        quantize=replace(s.quantize, min_score_share=0, epochs=1 if s.quantize.method == "qat" else s.quantize.epochs),
        measure=replace(s.measure, rounds=min(s.measure.rounds, ROUNDS), seconds=0),
        machine=replace(s.machine, wandb="off"),
    )
    if s.budget.requested:
        budget = replace(s.budget, rounds=min(s.budget.rounds, ROUNDS), retries=0)
        settings = replace(settings, prune=shorten_pruning(s.prune), budget=budget)
    return replace(plan, settings=settings)


def shorten_pruning(prune: PruneConfig) -> PruneConfig:
    """Returns settings with few steps of trials and, of two epochs, one in which units are masked."""
    short = replace(prune, trial_steps=min(prune.trial_steps, TRIAL_STEPS))
    return replace(short, gradual_share=0.5) if prune.schedule == "gradual" else short


def shorten_training(train: TrainConfig, epochs: int = 1) -> TrainConfig:
    """Returns settings with the same steps, but for a few epochs and at rates that aren't searched for."""
    schedule = "linear" if train.schedule in ("find", "plateau") else train.schedule
    return replace(train, epochs=epochs, patience=0, recoveries=0, schedule=schedule)


def count_epochs(settings: DistillConfig) -> dict[str, int]:
    """Returns the epochs of each stage that trains, by name."""
    s = settings
    students = [plan_epochs(s, target) for target in list_targets(s.budget)] if s.budget.requested else []
    epochs = {"general": s.general.train.epochs, "teacher": s.teacher_train.epochs, "distill": s.train.epochs}
    epochs |= {f"distill-{name}": s.attention_free_train.epochs for name in name_attention_free_students(s.student)}
    for student in students:
        epochs |= student
    return epochs


class SampledRun(Run):
    """A run on a sample of the data, which records what its stages take.

    Args:
        output: Temporary folder of the run.
        settings: The settings of the run that is predicted.
        short: Those of the sampled run.
    """

    console: "TimingConsole"
    is_sample = True

    def __init__(self, output: Path, settings: DistillConfig, short: DistillConfig):
        super().__init__(output, settings.seed, TimingConsole())
        self.settings, self.short, self.text_scale = settings, short, 1.0
        self.scales = dict.fromkeys(SPLIT_NAMES, 1.0)  # how many times as much text the data has as the sample
        self.predictions: list[Prediction] = []
        self.on_stage: Advance | None = None  # called after every stage

    def stage(
        self,
        name: str,
        config: Mapping[str, object],
        inputs: Mapping[str, Artefact | str],
        work: Callable[[Path], JsonObject],
        **how: Any,
    ) -> Artefact:
        """Runs a stage as `Run.stage` does, and adds its prediction."""
        self.console.clear()
        work = self._sample_data(work, dict(config)) if name == "data" else work
        done = super().stage(name, config, inputs, work, **how)
        if name == "select":
            self.scales["train"] = self._scale_selection(done.metrics)
        if self.on_stage is not None:
            self.on_stage(1, name)
        if name == "data":
            return done
        seconds = float(done.manifest["wall_seconds"])
        for unit, spent in self.console.spent.items():
            seconds += spent * (self._scale(name, unit, done.metrics) - 1)
        self.predictions.append(Prediction(name, done.manifest["peak_memory_bytes"], seconds))
        return done

    def _scale(self, stage: str, unit: str, metrics: JsonObject) -> float:
        """Returns how many times as much work the run has as the sample, in a unit of progress."""
        full, short = self.settings, self.short
        if unit == CALLS:
            return self._scale_rounds(stage)
        if unit == STEPS:
            return full.prune.trial_steps / max(1, short.prune.trial_steps)
        if unit not in (EXAMPLES, TEXTS):
            return 1.0
        scale = self._scale_blocks(metrics["blocks"]) if stage == "general" else self.scales[find_split(stage)]
        return scale * (self._scale_epochs(stage) if unit == EXAMPLES else 1)

    def _scale_selection(self, metrics: JsonObject) -> float:
        """Returns how many times as many rows the run trains on as the sample, of which another share was selected."""
        select, scale = self.settings.select, self.scales["train"]
        sampled, choice = metrics["train"] + metrics["unlabelled"], metrics["select_of"] * scale
        selected_rows = select.rows or select.share * choice
        return float(((sampled - metrics["select_kept"]) * scale + min(selected_rows, choice)) / sampled)

    def _scale_rounds(self, stage: str) -> float:
        """Returns how many times as many rounds of calls a stage of the run times."""
        full, short = count_rounds(self.settings, stage), count_rounds(self.short, stage)
        if is_evaluation(stage):  # each input is also run once before the rounds
            return (1 + full) / (1 + short)
        return limit_rounds(full, self.console.spent[CALLS] / self.console.blocks[CALLS] / short) / short

    def _scale_epochs(self, stage: str) -> float:
        """Returns how many times as many epochs a stage of the run trains."""
        if stage.startswith("quantize"):
            return self.settings.quantize.epochs / self.short.quantize.epochs
        return count_epochs(self.settings).get(stage, 1) / count_epochs(self.short).get(stage, 1)

    def _scale_blocks(self, sampled: int) -> float:
        """Returns how many times as many blocks of plain text there are as sampled ones."""
        max_blocks = self.settings.general.blocks
        return min(self.text_scale, max_blocks / sampled) if max_blocks else self.text_scale

    def _sample_data(self, work: Callable[[Path], JsonObject], settings: JsonObject) -> Callable[[Path], JsonObject]:
        def write_sample(folder: Path) -> JsonObject:
            metrics = work(folder)
            splits = read_data_folder(folder)
            sample = sample_splits(splits, SampleSizes.read(self.settings), self.seed)
            self.scales = {part: measure_scale(splits, sample, part) for part in SPLIT_NAMES}
            write_splits(sample, folder, settings)
            return metrics | {part: len(getattr(sample, part)) for part in SPLIT_NAMES}

        return write_sample


def count_rounds(settings: DistillConfig, stage: str) -> int:
    """Returns how often a stage times a model on each text."""
    if is_evaluation(stage):
        return settings.measure.rounds
    return settings.budget.rounds * (CANDIDATE_ROUNDS if stage.startswith("shape") else 1)


def find_split(stage: str) -> str:
    """Returns the split that a stage works through."""
    if stage.startswith("shape"):
        return "validation"
    return "test" if is_evaluation(stage) else "train"


class TimingConsole(Console):
    """A silent console that adds up the time of the work that progress bars show, by its unit."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.spent: defaultdict[str, float] = defaultdict(float)  # unit -> seconds
        self.blocks: Counter[str] = Counter()  # unit -> blocks of work, such as measurements

    def clear(self) -> None:
        """Forgets the work so far."""
        self.spent.clear()
        self.blocks.clear()

    @contextmanager
    def track(self, label: str, total: int, unit: str = EXAMPLES) -> Iterator[Advance]:
        """Yields a function to be called as the work goes on, and adds the time of the block."""
        start = time.perf_counter()
        with super().track(label, total, unit) as advance:
            yield advance
        self.spent[unit] += time.perf_counter() - start
        self.blocks[unit] += 1


@dataclass(frozen=True)
class TextSample:
    """The first documents of the plain text for general distillation, in a file.

    Args:
        file: A jsonl table.
        scale: How many times as many documents there are in all.
    """

    file: Path
    scale: float

    def apply(self, general: GeneralConfig) -> GeneralConfig:
        """Returns the settings with the sample in place of the text."""
        return replace(general, data=str(self.file), text=None)


def sample_text(general: GeneralConfig, folder: Path) -> TextSample:
    """Writes the first documents of the plain text, of as many characters as fill the sample's batches.

    A single document is cut, and the scale then counts its characters.
    """
    wanted = (1 + RANDOM_BATCHES) * general.train.rows * general.length * CHARACTERS_PER_TOKEN
    large = find_large_text(general.data)
    if large is None:
        documents = read_texts(general.data, general.text)
        chosen = take_characters(documents, wanted)
        scale = sum(map(len, documents)) / sum(map(len, chosen))
    else:
        chosen = take_characters(stream_texts(general.data, general.text), wanted)
        scale = large.count_rows() / len(chosen)
    folder.mkdir(parents=True)
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    return TextSample(file, scale)


def take_characters(documents: Iterable[str], count: int) -> list[str]:
    """Returns the first documents, of `count` characters in all; the last one is cut."""
    chosen: list[str] = []
    for text in documents:
        chosen.append(text[:count])
        count -= len(chosen[-1])
        if count <= 0:
            break
    return chosen


@dataclass(frozen=True)
class SampleSizes:
    """Rows of the sample.

    Args:
        batch: Rows of a batch, which the longest texts fill.
        train: Rows of the training split, if it has as many.
        others: Minimum rows of the other splits, on which models are timed and compared.
    """

    batch: int
    train: int
    others: int

    @staticmethod
    def read(settings: DistillConfig) -> "SampleSizes":
        """Returns the sizes at which the sample has everything that doesn't depend on the amount of data."""
        s = settings
        batch = max(s.train.rows, s.teacher_train.rows)
        scored = s.prune.samples if s.budget.requested else 0
        calibrated = s.quantize.samples if s.quantize.scheme else 0
        train = max((1 + RANDOM_BATCHES) * batch, scored, calibrated)
        is_delivered = s.until == "report"
        return SampleSizes(batch, train, max(2 * batch, is_delivered * max(s.measure.parity, s.measure.texts)))


def sample_splits(splits: Splits, sizes: SampleSizes, seed: int) -> Splits:
    """Returns a batch of the longest training texts and random ones, and the same share of the other splits."""
    train = sample_part(splits.train, sizes.batch, sizes.train, seed)
    share = len(train) / max(1, len(splits.train))
    others = {
        part: sample_part(examples, sizes.batch, max(sizes.others, round(share * len(examples))), seed)
        for part in ("validation", "test", "unlabelled")
        if (examples := getattr(splits, part)) is not None
    }
    return replace(splits, train=train, **others)


def sample_part(part: Any, longest: int, count: int, seed: int) -> Any:
    """Returns `count` samples of a split in their order: the `longest` longest ones, and random ones."""
    if len(part) <= count:
        return part
    order = np.argsort(-measure_lengths(part), kind="stable")
    others = np.random.default_rng(seed).permutation(order[longest:])[: count - longest]
    rows = np.sort(np.concatenate([order[:longest], others]))
    return take_rows(part, rows)


def measure_scale(splits: Splits, sample: Splits, part: str) -> float:
    """Returns how many times as many characters a split has as its sample; `train` includes what has no labels."""
    parts = ("train", "unlabelled") if part == "train" else (part,)
    whole, sampled = (sum(measure_lengths(getattr(each, name)).sum() for name in parts) for each in (splits, sample))
    return float(whole / max(1, sampled))
