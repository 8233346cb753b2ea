"""The select stage: the data with a part of its rows, chosen at random, by difficulty or by what they cover."""

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.data.batches.batches import EvalBatches
from distill.data.batches.encode import encode_samples
from distill.data.batches.packing import find_padding_id
from distill.data.clean.rows import JoinedTexts
from distill.data.select import coverage
from distill.data.select.config import VECTOR_METHODS, SelectConfig
from distill.data.select.scores import DYNAMICS, compute_label_loss, entropy, margin
from distill.data.sources.text_files import read_texts
from distill.data.splits.examples import Examples, Splits, take_rows
from distill.errors import InputError
from distill.losses.kept_share import scale_ce_by_kept_share
from distill.models.inputs import build_inputs
from distill.models.sentence_encoder import pool_states
from distill.tasks.task import Task
from pipelines.runs.console import TEXTS
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.data import print_new_remarks, read_data, read_task, read_task_settings, write_splits
from pipelines.stages.prepare.scoring import compute_outputs
from pipelines.stages.prepare.teacher import MODEL, load_stage_teacher, open_stage_checkpoint
from pipelines.stages.prepare.training_dynamics import read_dynamics
from pipelines.stages.train.cached_logits import read_cached_logits
from pipelines.stages.train.training_inputs import open_cached_signals

VERSION = 4  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
CHOSEN = "selected.json"
_ROWS = 64  # of a batch of which vectors are computed


def check_selection(config: SelectConfig, splits: Splits) -> None:
    """Checks that the number of rows fits the data.

    Raises:
        InputError: No row, or no fewer than there are, would be kept, or a class would be left without rows.
    """
    kept_rows = config.count_kept(count_rows(config, splits))
    labels = splits.train.labels
    if config.source != "train" or not labels or not isinstance(labels[0], int):
        return
    counts = np.bincount(labels, minlength=len(splits.labels))
    if kept_rows < np.count_nonzero(counts):
        raise InputError(
            f"data.select {config.method}: expected at least a row for each of {np.count_nonzero(counts)} classes, "
            f"found {kept_rows:,} rows to be kept: a class would be left empty"
        )
    rarest = int(np.where(counts > 0, counts, counts.max()).argmin())
    if config.method != "balanced" and round(kept_rows / len(labels) * counts[rarest]) < 1:
        raise InputError(
            f"data.select {config.method}: expected a share that leaves every class a row, found "
            f"{kept_rows / len(labels):.1%} of {counts[rarest]} rows of {splits.labels[rarest]!r}: keep more, or "
            "choose balanced"
        )


def count_rows(config: SelectConfig, splits: Splits) -> int:
    """Returns the number of rows to choose from."""
    return sum(len(getattr(splits, name)) for name in list_split_names(config))


def list_split_names(config: SelectConfig) -> tuple[str, ...]:
    """Returns the names of the splits to choose from."""
    return ("train", "unlabelled") if config.source == "all" else (config.source,)


def adapt_loss(run: Run, plan: RunPlan, selection: Artefact) -> RunPlan:
    """Returns the plan with the loss weights for the share of rows that was kept, if `scale_ce` is set.

    Changed weights are printed.
    """
    if not plan.settings.select.scale_ce or not selection.digest:
        return plan
    loss = scale_ce_by_kept_share(plan.settings.loss, float(selection.metrics["select_share"]))
    if loss != plan.settings.loss:
        run.console.say(f"  select: loss weights adjusted to the share of rows: kl {loss.kl:.3g}, ce {loss.ce:.3g}")
    return replace(plan, settings=replace(plan.settings, loss=loss))


def select_stage(run: Run, plan: RunPlan, data: Artefact, teacher: Artefact, cache: Artefact | None) -> Artefact:
    """Writes a copy of the data with the selected rows, and `selected.json` with their numbers.

    Answers of the teacher are read from the cache if there is one, and computed otherwise.
    """
    config = plan.settings.select
    used = {name: value for name, value in vars(config).items() if name not in ("target", "scale_ce")}
    inputs: dict[str, Artefact | str] = {"data": data}
    settings: JsonObject = {"select": used, "max_length": plan.settings.data.max_length}
    if config.needs_outputs and cache is not None:
        inputs["cache"] = cache
    elif config.needs_outputs or config.needs_dynamics or config.method in VECTOR_METHODS:
        inputs["teacher"] = teacher
    if config.target:
        inputs["target"] = run.content_hash(Path(config.target).expanduser())

    def work(folder: Path) -> JsonObject:
        splits = read_data(data)
        chosen = Selection(run, plan, splits, read_task(data), teacher, cache).choose()
        changed, rows, first = {}, {}, 0
        for name in list_split_names(config):
            part = getattr(splits, name)
            selected = np.sort(chosen[(chosen >= first) & (chosen < first + len(part))]) - first
            changed[name], rows[name] = take_rows(part, selected), selected.tolist()
            first += len(part)
        (folder / CHOSEN).write_text(json.dumps(rows))
        share = len(chosen) / first
        notes: dict[str, int | str] = {"select_kept": len(chosen), "select_of": first}
        remarks = [f"select: {len(chosen):,} of {first:,} rows of {config.source} by {config.method} ({share:.1%})"]
        remarks += describe_classes(splits, changed.get("train"))
        left = replace(splits, notes=splits.notes | notes, remarks=[*splits.remarks, *remarks], **changed)
        write_splits(left, folder, read_task_settings(data))
        counts = {name: len(part) for name, part in changed.items()}
        remarks = [*data.metrics.get("remarks", []), *remarks]
        return {**data.metrics, **counts, **notes, "select_share": share, "remarks": remarks}

    done = run.stage("select", settings, inputs, work, version=VERSION)
    print_new_remarks(run.console, done, data)
    return done


def describe_classes(splits: Splits, selected: Any) -> list[str]:
    """Returns a sentence with the smallest and the largest class of the rows that are kept."""
    if selected is None or not selected.labels or not isinstance(selected.labels[0], int):
        return []
    counts = np.bincount(selected.labels, minlength=len(splits.labels))
    few, many = int(counts.argmin()), int(counts.argmax())
    return [
        f"select: {counts[few]:,} rows of the smallest class, {splits.labels[few]!r}, and {counts[many]:,} of the "
        f"largest, {splits.labels[many]!r}"
    ]


class Selection:
    """The choice of rows among those of some splits, numbered one split after the other.

    Args:
        run: The run.
        plan: Its plan.
        splits: The data.
        task: The task.
        teacher: The stage with the teacher, for answers, vectors and the record of its training.
        cache: The stage with its cached answers; None without.
    """

    def __init__(
        self, run: Run, plan: RunPlan, splits: Splits, task: Task, teacher: Artefact, cache: Artefact | None
    ) -> None:
        self.run, self.plan, self.splits, self.task = run, plan, splits, task
        self.teacher, self.cache, self.config = teacher, cache, plan.settings.select
        self.parts = [getattr(splits, name) for name in list_split_names(self.config)]
        self.size = sum(map(len, self.parts))

    @cached_property
    def model(self) -> PreTrainedModel:
        """The teacher, in eval mode, on the run's device."""
        return load_stage_teacher(self.run, self.plan, self.teacher, self.task)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the teacher's tokenizer."""
        return open_stage_checkpoint(self.teacher, "teacher").load_tokenizer()

    def choose(self) -> np.ndarray:
        """Returns the numbers of the chosen rows; of train, at least one of each class."""
        count = self.config.count_kept(self.size)
        chosen = self._choose(count)
        labels = self.splits.train.labels
        if self.config.source == "train" and labels and isinstance(labels[0], int):
            return coverage.keep_classes(chosen, np.array(labels), self.run.seed)
        return chosen

    def _choose(self, count: int) -> np.ndarray:
        config, seed = self.config, self.run.seed
        if config.method == "random":
            return np.random.default_rng(seed).permutation(self.size)[:count]
        if config.method == "balanced":
            return coverage.choose_balanced(self.read_classes(), count, seed)
        if config.method == "ccs":
            return coverage.choose_strata(self.score(config.score), count, config.cutoff, seed)
        if config.method not in VECTOR_METHODS:
            return coverage.choose_by_difficulty(self.score(config.method), count, hard=config.prefer == "hard")
        vectors = torch.cat([self.embed(JoinedTexts(part)) for part in self.parts if len(part)])
        if config.method == "similarity":
            targets = self.embed(read_texts(config.target, self.plan.settings.data.text))
            return coverage.choose_similar(vectors, targets, count)
        with self.run.console.track("select: choosing rows", count, TEXTS) as advance:
            if config.method == "mixture":
                return coverage.choose_mixture(vectors, count, config.weight, advance)
            if config.method == "facility":
                return coverage.choose_facilities(vectors, count, seed, advance)
            return coverage.choose_centres(vectors, count, seed, advance)

    def read_classes(self) -> np.ndarray:
        """Returns the label of each row, or the class that the teacher finds most probable where there is none."""
        labels = [] if self.config.source == "unlabelled" else list(self.splits.train.labels)
        if len(labels) < self.size:
            labels += [int(logits.argmax()) for logits in self.read_logits()[len(labels) :]]
        return np.array(labels)

    def score(self, name: str) -> np.ndarray:
        """Returns the difficulty of each row, float64 [rows]."""
        labels = self.splits.train.labels
        if name in DYNAMICS:
            difficulty: Tensor = DYNAMICS[name](read_dynamics(self.teacher), torch.tensor(labels))
            return difficulty.double().numpy()
        row_logits = self.read_logits()
        if name == "loss":
            return compute_label_loss(torch.cat(row_logits), torch.tensor(labels)).double().numpy()
        measure = {"entropy": entropy, "margin": margin}[name]
        return np.array([float(measure(logits).mean()) for logits in row_logits])

    def read_logits(self) -> list[Tensor]:
        """Returns the teacher's logits for each row, each [rows of logits, classes]."""
        tokenizer, length = self.load_tokenizer(), self.plan.settings.data.max_length
        self.task.configure_tokenizer(tokenizer, self.teacher.folder / MODEL)
        pad_id = find_padding_id(tokenizer)
        labelled = self.splits.train
        if self.config.source == "unlabelled":
            labelled = take_rows(labelled, np.arange(1))  # only to show the shape of its labels
        rows = self.task.encode(tokenizer, labelled, length)
        if self.config.source != "train":
            rows = rows.join(self.task.encode(tokenizer, self.splits.unlabelled, length))
        first = len(labelled) if self.config.source == "unlabelled" else 0
        if self.cache is None:
            samples = compute_outputs(self.model, rows, pad_id, self.task).samples
            return [self.task.output_rows.logits({}, sample["logits"]) for sample in samples][first:]
        row_logits: list[Tensor] = [torch.zeros(0)] * len(rows)
        signals = open_cached_signals(self.cache)
        for numbers, _, logits, counts in read_cached_logits(rows, signals, self.task.output_rows, pad_id):
            for number, each in zip(numbers, logits.split(counts), strict=True):
                row_logits[number] = each
        return row_logits[first:]

    @torch.no_grad()
    def embed(self, texts: Any) -> Tensor:
        """Returns a vector for each text, [texts, width], see `select.vectors`."""
        tokenizer, column = self.load_tokenizer(), Examples(list(texts))
        encoded = encode_samples(tokenizer, column, self.plan.settings.data.max_length)
        batches = EvalBatches(encoded, _ROWS, find_padding_id(tokenizer))
        vectors: list[Tensor] = [torch.zeros(0)] * len(column)
        with self.run.console.track("select: vectors of texts", len(column), TEXTS) as advance:
            for rows, batch in zip(batches.order, batches, strict=True):
                on_device = {name: each.to(self.model.device) for name, each in batch.items()}
                if self.config.vectors == "embeddings":
                    states = self.model.get_input_embeddings()(on_device["input_ids"])
                else:
                    output = self.model(**build_inputs(self.model, on_device), output_hidden_states=True)
                    states = output["hidden_states"][-1]
                for row, vector in zip(
                    rows, pool_states(states, on_device["attention_mask"], "mean").cpu(), strict=True
                ):
                    vectors[row] = vector
                advance(len(rows))
        return torch.stack(vectors)
