"""The stages that fit the biases of a trained classifier's classes to the validation split."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distill.checkpoint.custom_models import load_model_folder, save_model_folder
from distill.data.batches.batches import EvalBatches
from distill.data.batches.encode import Batch
from distill.data.batches.packing import find_padding_id
from distill.tasks.class_biases import add_class_biases, fit_class_biases
from distill.tasks.scorer import Scorer
from distill.tasks.task import Task
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import compute_logits
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer

Outputs = Sequence[tuple[np.ndarray, Batch, Tensor]]  # numbers of the samples, their batch and its logits
VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def class_biases_stage(run: Run, name: str, model: Artefact, data: Artefact, max_length: int) -> Artefact:
    """Writes `model/`: the model of another stage with biases of its classes fitted to the validation split.

    Only the biases of the output layer change, so that a quantized model stays as it is otherwise.

    Args:
        run: The run.
        name: Name of the stage.
        model: The stage of the trained model.
        data: The data stage.
        max_length: Maximum number of tokens of a text.
    """

    def work(folder: Path) -> JsonObject:
        task, source, validation = read_task(data), model.folder / MODEL, read_data(data).validation
        tokenizer, network = load_student_tokenizer(source), load_model_folder(source)
        task.configure_tokenizer(tokenizer, source)
        encoded = task.encode(tokenizer, validation, max_length)
        batches = EvalBatches(encoded, 2 * task.eval_batch_size, find_padding_id(tokenizer))
        with torch.inference_mode():
            outputs = [
                (rows, batch, compute_logits(network, batch))
                for rows, batch in zip(batches.order, batches, strict=True)
            ]
        biases = fit_to_outputs(task, outputs)
        add_class_biases(network, biases)
        shutil.copytree(source, folder / MODEL, ignore=shutil.ignore_patterns("model*.safetensors*"))
        save_model_folder(network, folder / MODEL)
        before, after = (
            next(iter(score_outputs(task.scorer(encoded), outputs, added).values()))  # the task's metric
            for added in (torch.zeros_like(biases), biases)
        )
        most = int(biases.abs().argmax())
        run.console.say(
            f"  {name}: validation {before:.2%}, with fitted biases {after:.2%}; the largest is "
            f"{biases[most]:+.2f}, of {task.labels[most]!r}"
        )
        return {"val/score": after, "val/score_before": before, "biases": biases.tolist()}

    return run.stage(
        name, {"max_length": max_length}, {"model": model, "data": data}, work, version=VERSION, seeded=False
    )


def fit_to_outputs(task: Task, outputs: Outputs) -> Tensor:
    """Returns the biases [classes] that fit the labels of the outputs' rows: of samples, or of words for tags."""
    logits = torch.cat([task.output_rows.logits(batch, values) for _, batch, values in outputs])
    return fit_class_biases(logits, torch.cat([task.output_rows.labels(batch) for _, batch, _ in outputs]))


def score_outputs(scorer: Scorer, outputs: Outputs, biases: Tensor) -> dict[str, float]:
    """Returns the scores of the outputs with biases [classes] added to their logits."""
    for rows, batch, values in outputs:
        scorer.record(rows, batch, values + biases)
    return scorer.scores()
