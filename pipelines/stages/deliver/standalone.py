"""Export and evaluation of checkpoints that weren't trained by a run of this output folder."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.tasks.choose import TASKS, choose_task
from pipelines.runs.console import Console
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.evaluate import EvaluateConfig
from pipelines.settings.lengths import fitted_length
from pipelines.settings.schemes import needs_reduced_range
from pipelines.settings.tokenizers import load_checked_tokenizer
from pipelines.stages.deliver.evaluate import evaluate_stage
from pipelines.stages.deliver.evaluated_model import EvaluatedModel
from pipelines.stages.deliver.export import export_stage, requested_targets
from pipelines.stages.prepare.compared_texts import as_plain_texts
from pipelines.stages.prepare.data import data_stage, read_data, read_task
from pipelines.stages.prepare.label_order import label_order_stage
from pipelines.stages.prepare.teacher import MODEL


def evaluate_standalone(
    config: EvaluateConfig, console: Console
) -> tuple[Run, list[EvaluatedModel], Artefact, Artefact]:
    """Exports and evaluates the configured checkpoints.

    Returns:
        (run, candidates, data, evaluation)

    Raises:
        InputError: A checkpoint, a data set or a format is invalid, or they don't fit together.
    """
    models = [("student" if config.teacher else "model", config.model)]
    if config.teacher:
        models.insert(0, ("teacher", config.teacher))
    checkpoints = [open_checkpoint(name, role) for role, name in models]
    run = Run(Path(config.output), config.seed, console)
    task_name, reason = choose_task(config.task, checkpoints[0].config, checkpoints[0].name, config.data)
    config, note = check_evaluated_models(config, task_name, checkpoints)
    console.say(f"  task: {task_name} ({reason}{note})")
    data = data_stage(run, config.data, task_name)
    splits, task = read_data(data), read_task(data)
    candidates = [export_checkpoint(run, config, checkpoint, data) for checkpoint in checkpoints]
    done = evaluate_stage(run, candidates, splits, data, config.measure, config.data.max_length, task, seconds=math.inf)
    return run, candidates, data, done


def export_checkpoint(run: Run, config: EvaluateConfig, checkpoint: Checkpoint, data: Artefact) -> EvaluatedModel:
    """Exports a checkpoint, with its labels in the data's order, in the configured formats.

    Raises:
        InputError: The checkpoint's head lacks the data's labels.
        ExportError: No format reproduces the model.
    """
    name, ordered = checkpoint.role, label_order_stage(run, checkpoint, data)
    export = export_stage(
        run,
        f"export-{name}",
        ordered,
        ordered.folder / MODEL,
        as_plain_texts(read_data(data).test),
        parity=config.measure.parity,
        max_length=config.data.max_length,
        targets=requested_targets(config.export, ordered.folder / MODEL, dynamic=config.dynamic),
        reduce_range=needs_reduced_range(config.processor, ordered.folder / MODEL, dynamic=config.dynamic),
    )
    return EvaluatedModel(name, "checkpoint", export)


def check_evaluated_models(
    config: EvaluateConfig, task_name: str, checkpoints: Sequence[Checkpoint]
) -> tuple[EvaluateConfig, str]:
    """Returns the configuration with its text length, and a note if that is shorter than usual; see `fitted_length`.

    Raises:
        InputError: A checkpoint is incomplete, or a tokenizer doesn't belong to its model.
    """
    task = TASKS[task_name](())
    configs = {each.role: each.config for each in checkpoints}  # which registers a pruned model's class for its weights
    for each in checkpoints:
        task.check_weights(each.folder, each.role)
    models = {each.role: (configs[each.role], load_checked_tokenizer(each, task)) for each in checkpoints}
    length, note = fitted_length(config.data.max_length, task, models)
    return replace(config, data=replace(config.data, max_length=length)), note
