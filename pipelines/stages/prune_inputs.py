"""The stages before the shape search, apart from the importance scores: the model to prune and the cost model."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from compress.export.common.huggingface import export_huggingface
from compress.export.common.targets import by_scheme
from compress.measure.latency import Latency
from compress.prune.search.candidates import first_units, outline_of
from compress.prune.search.cost import CostModel, Outline, fit_costs, plan
from compress.prune.vocabulary.vocabulary import choose_tokens, count_tokens, prune_vocabulary
from compress.quantize.config import QuantizeConfig
from distill.checkpoint.pruned import head_width, load_pruned
from distill.data.splits.labelled import Splits
from distill.slicing import Axis, factorise_embeddings, find_axes, prune
from distill.tasks.names import LANGUAGE
from distill.tasks.task import Task
from pipelines.reports.pruning_summary import COSTS
from pipelines.runs.files import write_json
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.plan import Plan
from pipelines.settings.schemes import is_dynamic_reduced, quantization_by
from pipelines.settings.this_machine import describe
from pipelines.stages.budget_timing import build, target_for, texts_of, time_together
from pipelines.stages.data import read_data, read_task
from pipelines.stages.distill import make_student
from pipelines.stages.teacher import MODEL
from pipelines.stages.vocabulary import WORDS, tokenizer_of

START_VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
COSTS_VERSION = 1  # version of the costs stage, as above


def start_stage(run: Run, plan: Plan, data: Artefact, teacher: Artefact) -> Artefact:
    """Writes `model/`, the model to prune, and `words.npy`, the ids of the teacher's tokens that are kept.

    If requested, tokens that don't occur in the training texts are removed and the embedding matrix is factorised.
    """
    config = plan.settings
    spec, rank = config.student.spec, config.prune.embedding_rank
    # A language model predicts its whole vocabulary, and its teacher's signals cover every token.
    prune_words = config.prune.vocabulary and config.task not in LANGUAGE
    settings = {
        "student": spec,
        "vocabulary": prune_words,
        "unseen": config.prune.unseen if prune_words else None,
        "embedding_rank": rank,
    }
    inputs: dict[str, Any] = {"data": data, "teacher": teacher}
    if plan.student is not None:
        inputs["student"] = run.digest(plan.student)

    def work(folder: Path) -> dict[str, Any]:
        source, splits = teacher.folder / MODEL, read_data(data)
        model, tokenizer = load_pruned(source), tokenizer_of(source)
        if spec != "teacher":
            model = make_student(plan, model, tokenizer, read_task(data), run.seed)
        had, before = model.config.vocab_size, model.num_parameters()
        words = np.arange(max(tokenizer.get_vocab().values()) + 1)
        counts = count_tokens(tokenizer, training_texts(splits)) if prune_words or rank else np.zeros(0, np.int64)
        if prune_words:
            words = choose_tokens(tokenizer, counts, coverage=1.0, unseen=config.prune.unseen)
            model, tokenizer = prune_vocabulary(model, tokenizer, words)
        if rank:
            model = factorise_embeddings(model, rank, counts_of(model, counts[words]))
        export_huggingface(model, tokenizer, folder / MODEL)
        np.save(folder / WORDS, words)
        run.console.say(
            f"  start: {len(words):,} of {had:,} words stay, "
            f"{f'in {rank} columns, ' if rank else ''}"
            f"{4 * (before - model.num_parameters()) / 1e6:.1f} MB of fp32 embeddings go"
        )
        return {"words": len(words), "params": model.num_parameters()}

    return run.stage("start", settings, inputs, work, version=START_VERSION)


def counts_of(model: PreTrainedModel, counts: np.ndarray) -> np.ndarray:
    """Returns the number of uses of each embedding row; rows beyond the tokenizer's vocabulary have none."""
    return np.pad(counts, (0, max(0, model.config.vocab_size - len(counts))))


def axes_of(model: PreTrainedModel, task: Task) -> list[Axis]:
    """Returns the axes of a model that can be pruned for a task."""
    return [axis for axis in find_axes(model) if not (task.keeps_width and axis.kind == "hidden")]


def training_texts(splits: Splits) -> Iterator[str] | Iterator[list[str]]:
    """Yields every text that the student is trained on, or its list of words."""
    for part in (splits.train, splits.unlabelled):
        yield from part.texts
        yield from part.pairs or ()


def costs_stage(run: Run, config: DistillConfig, data: Artefact, teacher: Artefact, start: Artefact) -> Artefact:
    """Fits the costs of heads, neurons and layers to measurements in the budget's runtime.

    The teacher and about a dozen sizes of the start model are measured.
    """
    conditions = {k: v for k, v in asdict(config.budget).items() if k not in GOALS}
    how = timing_quantization(config)
    settings = {
        "budget": conditions,
        "max_length": config.data.max_length,
        "machine": describe(),
        "scheme": rounding_key(config),
    }

    def work(folder: Path) -> dict[str, Any]:
        model, tokenizer = load_pruned(start.folder / MODEL), tokenizer_of(start.folder / MODEL)
        task = read_task(data)
        axes = axes_of(model, task)
        texts = texts_of(read_data(data).validation, config.budget, config.data.max_length, run.seed, task)
        outlines = plan(outline_of(axes), step=head_width(model.config), uniform=config.budget.uniform)
        scratch = folder / SCRATCH / "exports"
        built = {}
        with run.console.track("costs: exporting sizes to measure", len(outlines) + 1, "models") as advance:
            source = teacher.folder / MODEL
            reference = target_for(config.budget, teacher=True)
            built["teacher"] = build(load_pruned(source), tokenizer_of(source), reference, scratch / "teacher", texts)
            advance(1)
            for number, outline in enumerate(outlines):
                small = prune(model, axes, first_units(axes, outline))
                place = scratch / str(number)
                built[str(number)] = build(
                    small, tokenizer, target_for(config.budget), place, texts, how, reduced=is_dynamic_reduced(config)
                )
                advance(1)
        found = time_together(built, config.budget)
        costs = fit_costs(outlines, [found[str(i)].best_ms for i in range(len(outlines))])
        rows = [measured_row(outline, found[str(i)], built[str(i)].bytes) for i, outline in enumerate(outlines)]
        teacher_ms = found["teacher"].best_ms
        write_json(folder / COSTS, {"teacher": asdict(found["teacher"]), "costs": asdict(costs), "measured": rows})
        run.console.say(
            f"  costs: teacher {teacher_ms:.3f} ms; {len(rows)} sizes measured, the sum of parts is off by "
            f"{100 * costs.error:.1f} % (median)"
        )
        return {"teacher_ms": teacher_ms, "error": costs.error}

    return run.stage("costs", settings, {"data": data, "teacher": teacher, "start": start}, work, version=COSTS_VERSION)


def timing_quantization(config: DistillConfig) -> QuantizeConfig | None:
    """Returns the quantization that students are timed with: the final one for an int8 budget, otherwise None."""
    if not config.quantize.scheme or config.budget.precision != "int8":
        return None
    return quantization_by(config, next(iter(by_scheme([config.budget.runtime], config.quantize.scheme))))


def rounding_key(config: DistillConfig) -> Any:
    """Returns the quantization settings that latency measurements depend on, for stage keys."""
    how = timing_quantization(config)
    if how is None:
        return "reduced" if is_dynamic_reduced(config) else ""
    return [how.scheme, how.keep, how.reduced]


GOALS = ("speedup", "latency_ms", "max_bytes", "min_score", "uniform")  # of a budget, not measurement conditions


def measured_row(outline: Outline, latency: Latency, size: int) -> dict[str, Any]:
    return asdict(outline) | {"best_ms": latency.best_ms, "p90_ms": latency.p90_ms, "bytes": size}


def read_sizes(costs: Artefact) -> CostModel:
    """Returns a cost model of file sizes in bytes, with the terms of the latency model, fitted to the same models."""
    measured = json.loads((costs.folder / COSTS).read_text())["measured"]
    outlines = [Outline(row["hidden"], tuple(row["heads"]), tuple(row["ffn"])) for row in measured]
    return fit_costs(outlines, [row["bytes"] for row in measured])
