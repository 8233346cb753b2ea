"""Predicted memory and time of a run's stages: the same stages, run for one epoch on a sample of the data."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from distill.data.sources.text_batches import find_large_text, stream_texts
from distill.data.sources.text_files import read_texts
from distill.data.splits.examples import Splits
from distill.train.config import TrainConfig
from pipelines.runs.console import Advance, Console
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.distill_config import DistillConfig, GeneralConfig
from pipelines.settings.plan import Plan
from pipelines.stages.pipeline import run_stages
from pipelines.stages.prepare.compared_texts import as_plain_texts
from pipelines.stages.prepare.data import SPLIT_NAMES, read_data_folder, take_rows, write_splits

RANDOM_BATCHES = 16  # of random texts in the sample, beside one of the longest texts
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


def predict_stages(plan: Plan) -> list[Prediction]:
    """Returns predictions of the stages up to the training of the student, or of the cache if it will be pruned.

    The sample has a batch of the longest texts, which the peak depends on. The time of work on texts is scaled to all
    of them by their characters, and to all epochs.
    """
    with TemporaryDirectory(prefix="stillroom-") as place:
        run, short = SampledRun(Path(place) / "run", plan.settings), shorten_plan(plan)
        if plan.settings.general.data:
            sample = sample_text(plan.settings.general, Path(place) / "text")
            run.text_scale = sample.scale
            short = replace(short, settings=replace(short.settings, general=sample.apply(short.settings.general)))
        run_stages(run, short)
        return run.predictions


def shorten_plan(plan: Plan) -> Plan:
    """Returns the plan with one epoch of every training and without the stages that aren't predicted."""
    s = plan.settings
    is_untrained = s.budget.requested or s.student.given  # the student, without stages that aren't predicted
    settings = replace(
        s,
        until=s.until if s.until in ("general", "teacher", "cache") else "cache" if is_untrained else "distill",
        train=shorten_training(s.train),
        teacher_train=shorten_training(s.teacher_train),
        general=replace(s.general, train=shorten_training(s.general.train)),
        machine=replace(s.machine, wandb="off"),
    )
    return replace(plan, settings=settings)


def shorten_training(train: TrainConfig) -> TrainConfig:
    """Returns settings with the same steps, but for one epoch and at rates that aren't searched for."""
    schedule = "linear" if train.schedule in ("find", "plateau") else train.schedule
    return replace(train, epochs=1, patience=0, recoveries=0, schedule=schedule)


class SampledRun(Run):
    """A run on a sample of the data, which records what its stages take.

    Args:
        output: Temporary folder of the run.
        settings: The settings of the run that is predicted.
    """

    console: "TimingConsole"

    def __init__(self, output: Path, settings: DistillConfig):
        super().__init__(output, settings.seed, TimingConsole())
        self.settings, self.scale, self.text_scale = settings, 1.0, 1.0
        self.predictions: list[Prediction] = []

    def stage(
        self,
        name: str,
        config: Mapping[str, object],
        inputs: Mapping[str, Artefact | str],
        work: Callable[[Path], JsonObject],
        **how: Any,
    ) -> Artefact:
        """Runs a stage as `Run.stage` does, and adds its prediction."""
        self.console.tracked = 0.0
        if name == "data":
            return super().stage(name, config, inputs, self._sample_data(work, dict(config)), **how)
        done = super().stage(name, config, inputs, work, **how)
        wall, tracked = float(done.manifest["wall_seconds"]), self.console.tracked
        scale = self._scale_blocks(done.metrics["blocks"]) if name == "general" else self.scale
        seconds = wall - tracked + tracked * scale * self._count_epochs(name)
        self.predictions.append(Prediction(name, done.manifest["peak_memory_bytes"], seconds))
        return done

    def _count_epochs(self, stage: str) -> int:
        """Returns how often a stage works on each text."""
        s = self.settings
        trainings = {"general": s.general.train, "teacher": s.teacher_train, "distill": s.train}
        return trainings[stage].epochs if stage in trainings else 1

    def _scale_blocks(self, sampled: int) -> float:
        """Returns how many times as many blocks of plain text there are as sampled ones."""
        most = self.settings.general.blocks
        return min(self.text_scale, most / sampled) if most else self.text_scale

    def _sample_data(self, work: Callable[[Path], JsonObject], settings: JsonObject) -> Callable[[Path], JsonObject]:
        def write_sample(folder: Path) -> JsonObject:
            metrics = work(folder)
            splits = read_data_folder(folder)
            rows = max(self.settings.train.rows, self.settings.teacher_train.rows)
            sample = sample_splits(splits, rows, self.seed)
            self.scale = measure_total_length(splits) / max(1, measure_total_length(sample))
            write_splits(sample, folder, settings)
            return metrics | {part: len(getattr(sample, part)) for part in SPLIT_NAMES}

        return write_sample


class TimingConsole(Console):
    """A silent console that adds up the time of work on texts, which is what progress bars show."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.tracked = 0.0

    @contextmanager
    def track(self, label: str, total: int, unit: str = "examples") -> Iterator[Advance]:
        """Yields a function to be called as the work goes on, and adds the time of the block."""
        start = time.perf_counter()
        with super().track(label, total, unit) as advance:
            yield advance
        self.tracked += time.perf_counter() - start


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


def sample_splits(splits: Splits, rows: int, seed: int) -> Splits:
    """Returns a batch of the longest training texts and random ones, and the same share of the other splits.

    Args:
        splits: The data.
        rows: Rows of a batch.
        seed: Of the random texts.
    """
    train = sample_part(splits.train, rows, (1 + RANDOM_BATCHES) * rows, seed)
    share = len(train) / max(1, len(splits.train))
    others = {
        part: sample_part(found, 2 * rows, max(2 * rows, round(share * len(found))), seed)
        for part in ("validation", "test", "unlabelled")
        if (found := getattr(splits, part)) is not None
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


def measure_lengths(part: Any) -> np.ndarray:
    """Returns the length of each sample in characters, of a tagger's in words; int64 [samples]."""
    plain = as_plain_texts(part)
    lengths = np.array([len(text) for text in plain.texts], dtype=np.int64)
    return lengths if plain.pairs is None else lengths + np.array([len(text) for text in plain.pairs])


def measure_total_length(splits: Splits) -> int:
    """Returns the length of all samples that are trained on."""
    return int(sum(measure_lengths(part).sum() for part in (splits.train, splits.unlabelled)))
