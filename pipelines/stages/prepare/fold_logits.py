"""A teacher's logits for training rows that it wasn't trained on, from a training for each fold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distill.data.batches.packing import find_padding_id
from distill.data.splits.examples import Splits, take_rows
from distill.parallel.layout import Layout
from distill.tasks.task import Task
from pipelines.runs.files import replace_folder
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.stage import Run
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.scoring import compute_outputs
from pipelines.stages.prepare.teacher import build_teacher_texts, build_untrained_teacher, finetune_teacher

LOGITS = "logits.pt"


def compute_out_of_fold_logits(
    run: Run, plan: RunPlan, splits: Splits, task: Task, folds: np.ndarray, precision: str, scratch: Path
) -> Tensor:
    """Returns the logits of every training row by the teacher that was trained on the other folds, [rows, classes].

    A finished fold is kept in `scratch`, so that a stage that is killed goes on with the next one.
    """
    all_logits: Tensor | None = None
    for fold in range(int(folds.max()) + 1):
        held_out = np.flatnonzero(folds == fold)
        folder = scratch / f"fold-{fold}"
        if not (folder / LOGITS).exists():
            logits = _train_fold(run, plan, splits, task, np.flatnonzero(folds != fold), held_out, precision, folder)
            with replace_folder(folder) as fresh:
                torch.save(logits, fresh / LOGITS)
        logits = torch.load(folder / LOGITS, weights_only=True)
        all_logits = logits.new_empty(len(folds), logits.shape[1]) if all_logits is None else all_logits
        all_logits[torch.from_numpy(held_out)] = logits
    assert all_logits is not None
    return all_logits


def _train_fold(
    run: Run,
    plan: RunPlan,
    splits: Splits,
    task: Task,
    rows: np.ndarray,
    held_out: np.ndarray,
    precision: str,
    folder: Path,
) -> Tensor:
    """Returns the logits of the `held_out` rows by a teacher trained on `rows`, [held-out rows, classes]."""
    config, source = plan.settings, plan.teacher.folder
    tokenizer, fold_splits = plan.teacher.load_tokenizer(), replace(splits, train=take_rows(splits.train, rows))
    task.configure_tokenizer(tokenizer, source)
    data = build_teacher_texts(run, config, fold_splits, tokenizer, task)
    (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
    model = build_untrained_teacher(run, config, source, task, data, folder)
    finetune_teacher(run, config, model, task, data, folder, precision, Layout(), None)
    encoded = task.encode(tokenizer, take_rows(splits.train, held_out), config.data.max_length)
    outputs = compute_outputs(model, encoded, find_padding_id(tokenizer), task)
    return torch.cat([sample["logits"].reshape(1, -1) for sample in outputs.samples]).float()
