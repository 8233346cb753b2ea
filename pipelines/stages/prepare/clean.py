"""The clean stage: the data with repaired texts and without the rows that mislead, and a record of every change."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.checkpoint.checkpoint import Checkpoint
from distill.data.clean.config import CleanConfig
from distill.data.clean.deployment import write_preprocessing
from distill.data.clean.label_errors import draw_folds, estimate_label_errors, relabel
from distill.data.clean.person_names import NameFinder
from distill.data.clean.rows import CleanedRow, Cleaning
from distill.data.clean.spelling import VERSION as SPELLING
from distill.data.clean.spelling import WORD, read_english_words, read_known_words
from distill.data.clean.text_steps import Change
from distill.data.splits.examples import Splits, take_rows
from distill.data.stored.encoding import count_processors
from pipelines.runs.console import TEXTS
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.data import print_new_remarks, read_data, read_task, read_task_settings, write_splits
from pipelines.stages.prepare.fold_logits import compute_out_of_fold_logits
from pipelines.stages.prepare.teacher import finetuning_settings

VERSION = 7  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
CHANGES = "clean.jsonl"
DOUBTED = 0.5  # probability that a label is wrong from which on it is doubted
_FREQUENT_IDS = 8000  # of a vocabulary, whose first tokens are the most frequent
_LONG = 5  # letters of a token that is taken for a word wherever it stands in the vocabulary
_PARALLEL_FROM = 50_000  # rows from which on processes of their own clean texts: they take a second to start


def clean_stage(run: Run, plan: RunPlan, data: Artefact, precision: str) -> Artefact:
    """Writes a copy of the data after all steps, and `clean.jsonl` with every row that was changed or dropped."""
    config = plan.settings.clean
    settings: JsonObject = {"steps": [list(step) for step in config.find_steps()]}
    settings |= {"deploy": [list(step) for step in config.find_deployed()]} if config.deploy else {}
    names = {step.name for step in config.find_steps()}
    inputs: dict[str, Artefact | str] = {"data": data}
    if plan.name_tagger is not None:
        inputs["tagger"] = run.digest(plan.name_tagger)
    if "spelling" in names:
        settings["spelling"] = SPELLING
        inputs["teacher"] = run.digest(plan.teacher)
        inputs |= {"words": run.content_hash(Path(config.words).expanduser())} if config.words else {}
    if "labels" in names:
        settings |= {"folds": config.folds} | finetuning_settings(plan.settings, precision)
        inputs["teacher"] = run.digest(plan.teacher)

    def work(folder: Path) -> JsonObject:
        splits = read_data(data)
        rows = max(len(splits.train), len(splits.unlabelled))
        with (folder / CHANGES).open("w") as file:
            cleaning = Cleaning(
                config,
                collect_listed_words(config, plan.teacher, splits) if "spelling" in names else frozenset(),
                lambda row: write_row(file.write, row),
                folder / SCRATCH,
                count_processors() if rows >= _PARALLEL_FROM else 0,
                prepare_names(plan),
            )
            with run.console.track("clean", cleaning.count_work(splits), TEXTS) as cleaning.advance:
                changed = cleaning.clean(splits)
            if "labels" in names:
                changed = clean_labels(run, plan, changed, data, precision, cleaning, folder)
        write_splits(changed, folder, read_task_settings(data))
        if config.deploy:
            write_preprocessing(folder, config.find_deployed(), cleaning.speller)
        left = {part: len(getattr(changed, part)) for part in ("train", "unlabelled")}
        run.console.say(
            f"  clean: {left['train']:,} of {len(splits.train):,} training rows stay; {CHANGES} has every change"
        )
        remarks = [*data.metrics.get("remarks", []), *cleaning.describe()]
        return {**data.metrics, **left, **cleaning.name_counts(), "remarks": remarks}

    done = run.stage("clean", settings, inputs, work, version=VERSION)
    print_new_remarks(run.console, done, data)
    return done


def prepare_names(plan: RunPlan) -> dict[str, Change]:
    """Returns what the step names does, by its name; nothing without a tagger."""
    if plan.name_tagger is None:
        return {}
    (step,) = [step for step in plan.settings.clean.find_steps() if step.name == "names"]
    folder = str(plan.name_tagger.folder)
    return {"names": NameFinder(folder, NameFinder.mask if step.value == "mask" else "").replace}


def write_row(write: Callable[[str], object], row: CleanedRow) -> None:
    """Writes a row of the record as a line of JSON."""
    write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")


def collect_listed_words(config: CleanConfig, teacher: Checkpoint, splits: Splits) -> frozenset[str]:
    """Returns the words that spelling takes for right: of the list, the user's file, the labels and the teacher."""
    words = read_english_words()
    words |= {token for token, number in teacher.load_tokenizer().get_vocab().items() if _is_word(token, number)}
    words |= {word for label in splits.labels for word in WORD.findall(label.replace("_", " "))}
    if config.words:
        words |= read_known_words(Path(config.words).expanduser())
    return frozenset(words)


def _is_word(token: str, number: int) -> bool:
    return token.isalpha() and (len(token) >= _LONG or number < _FREQUENT_IDS)


def clean_labels(
    run: Run, plan: RunPlan, splits: Splits, data: Artefact, precision: str, cleaning: Cleaning, folder: Path
) -> Splits:
    """Returns the splits after the step labels, which reports, drops, unlabels or relabels rows."""
    (step,) = [step for step in plan.settings.clean.find_steps() if step.name == "labels"]
    folds = draw_folds(splits.train.labels, plan.settings.clean.folds, run.seed)
    logits = compute_out_of_fold_logits(run, plan, splits, read_task(data), folds, precision, folder / SCRATCH)
    several = isinstance(splits.train.labels[0], list)
    probabilities = (logits.sigmoid() if several else torch.softmax(logits, -1)).numpy()
    doubts = estimate_label_errors(splits.train.labels, logits)
    wrong = np.flatnonzero(doubts > DOUBTED)
    labels: list[Any] = list(splits.train.labels)
    for row in wrong.tolist():
        better = relabel(labels[row], probabilities[row])
        cleaning.add_label(row, splits.train, labels[row], better, splits.labels, step.value, doubts[row])
        labels[row] = better
    if step.value == "relabel":
        return replace(splits, train=replace(splits.train, labels=labels))
    if step.value == "report":
        return splits
    remaining = take_rows(splits.train, np.setdiff1d(np.arange(len(labels)), wrong))
    if step.value == "drop":
        return replace(splits, train=remaining)
    return replace(splits, train=remaining, unlabelled=take_rows(splits.train, wrong).join(splits.unlabelled))
