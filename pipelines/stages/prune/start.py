"""The first stage of pruning: the model to prune, without unused tokens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from compress.export.common.huggingface import export_huggingface
from compress.prune.vocabulary.vocabulary import choose_tokens, count_tokens, prune_vocabulary
from distill.checkpoint.custom_models import load_model_folder
from distill.data.splits.examples import Splits
from distill.slicing import Axis, factorize_embeddings, find_axes
from distill.tasks.names import LANGUAGE_TASKS
from distill.tasks.task import Task
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.compared_texts import as_plain_texts
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import TOKENS_FILE, load_student_tokenizer
from pipelines.stages.train.distill import make_student

VERSION = 2  # of the algorithm; bump it when the same inputs give a different result (docs/stages.md)


def pruning_start_stage(run: Run, plan: RunPlan, data: Artefact, teacher: Artefact) -> Artefact:
    """Writes `model/`, the model to prune, and `token_ids.npy`, the ids of the teacher's tokens that are kept.

    If requested, tokens that don't occur in the training texts are removed and the embedding matrix is factorized.
    """
    config = plan.settings
    spec, rank = config.student.spec, config.prune.embedding_rank
    # A language model predicts its whole vocabulary, and its teacher's signals cover every token.
    prune_tokens = config.prune.vocabulary and config.task not in LANGUAGE_TASKS
    settings = {
        "student": plan.student_key,
        "vocabulary": prune_tokens,
        "unseen": config.prune.max_split_share if prune_tokens else None,
        "embedding_rank": rank,
    }
    inputs: dict[str, Artefact | str] = {"data": data, "teacher": teacher}
    if plan.student is not None:
        inputs["student"] = run.digest(plan.student)

    def work(folder: Path) -> JsonObject:
        source, splits = teacher.folder / MODEL, read_data(data)
        model, tokenizer = load_model_folder(source), load_student_tokenizer(source)
        if spec != "teacher":
            model = make_student(plan, model, tokenizer, read_task(data), run.seed)
        vocabulary, params = model.config.vocab_size, model.num_parameters()
        tokens = np.arange(max(tokenizer.get_vocab().values()) + 1)
        counts = count_tokens(tokenizer, training_texts(splits)) if prune_tokens or rank else np.zeros(0, np.int64)
        if prune_tokens:
            tokens = choose_tokens(tokenizer, counts, coverage=1.0, unseen=config.prune.max_split_share)
            model, tokenizer = prune_vocabulary(model, tokenizer, tokens)
        if rank:
            model = factorize_embeddings(model, rank, pad_counts(model, counts[tokens]))
        export_huggingface(model, tokenizer, folder / MODEL)
        np.save(folder / TOKENS_FILE, tokens)
        run.console.say(
            f"  start: {len(tokens):,} of {vocabulary:,} tokens retained, "
            f"{f'embeddings of rank {rank}, ' if rank else ''}"
            f"{4 * (params - model.num_parameters()) / 1e6:.1f} MB of fp32 embeddings removed"
        )
        return {"tokens": len(tokens), "params": model.num_parameters()}

    return run.stage("start", settings, inputs, work, version=VERSION)


def pad_counts(model: PreTrainedModel, counts: np.ndarray) -> np.ndarray:
    """Returns the number of uses of each embedding row; rows beyond the tokenizer's vocabulary have none."""
    return np.pad(counts, (0, max(0, model.config.vocab_size - len(counts))))


def find_prunable_axes(model: PreTrainedModel, task: Task) -> list[Axis]:
    """Returns the axes of a model that can be pruned for a task."""
    return [axis for axis in find_axes(model) if not (task.needs_teacher_width and axis.kind == "hidden")]


def training_texts(splits: Splits) -> Iterator[str] | Iterator[list[str]]:
    """Yields every text that the student is trained on, or its list of words."""
    for part in map(as_plain_texts, (splits.train, splits.unlabelled)):
        yield from part.texts
        yield from part.pairs or ()
