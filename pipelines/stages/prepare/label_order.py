"""Stages for checkpoints that are already trained: their labels are reordered to match the data's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distill.checkpoint.checkpoint import Checkpoint
from distill.errors import InputError
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.stages.prepare.data import read_task
from pipelines.stages.prepare.teacher import MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.quantize.prepare import ModelQuantization

VERSION = 2  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def label_order_stage(run: Run, checkpoint: Checkpoint, data: Artefact) -> Artefact:
    """Writes `model/`: the checkpoint with its labels in the data's order, matched by name.

    Raises:
        InputError: The checkpoint's head lacks the data's labels or its weights.
    """
    name, folder = checkpoint.role, checkpoint.folder
    stage = f"{name}-by-label"
    if data.digest is None:  # a dry run doesn't read the labels
        return run.plan_stage(stage)
    from compress.export.common.huggingface import export_huggingface
    from compress.quantize.store import is_quantized, load_quantization, save_quantization

    task = read_task(data)
    task.check(checkpoint.config, str(folder))
    rows, missing = task.find_head(folder, checkpoint.config)
    if rows is None:
        raise InputError(
            f"{name} {str(folder)!r}: expected {task.describe_head()}, found none"
            f"{f': {missing}' if missing else ''}: it can't be scored"
        )

    def work(output: Path) -> JsonObject:
        tokenizer = checkpoint.load_tokenizer()
        task.configure_tokenizer(tokenizer, folder)
        model = task.load_with_head(str(folder), rows)
        export_huggingface(model, tokenizer, output / MODEL)
        if is_quantized(folder):
            save_quantization(reorder_scales(load_quantization(folder), model, rows), output / MODEL)
        return {}

    settings = {"task": task.name, "labels": list(task.labels)}
    return run.stage(stage, settings, {"model": run.digest(checkpoint)}, work, version=VERSION)


def reorder_scales(
    quantization: "ModelQuantization", model: "PreTrainedModel", rows: Sequence[int]
) -> "ModelQuantization":
    """Returns the quantization of a model whose output layer has the rows `rows` of the quantized one."""
    from distill.tasks.task import output_layer

    if not rows:  # a task without labels
        return quantization
    head = output_layer(model)
    name = next(name for name, module in model.named_modules() if module is head)
    if name not in quantization:
        return quantization
    layer = quantization[name]
    return {**quantization, name: replace(layer, scales=layer.scales[list(rows)])}
